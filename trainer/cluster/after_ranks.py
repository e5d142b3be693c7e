"""What the job's batch shell runs when srun has failed, whatever of: does the run go on, and must the job be requeued?

A rank that can still speak enters the end of its attempt in attempts.jsonl, and rank 0 requeues the job at a stop. But
all ranks may have been killed, srun with them, or Slurm did not answer: the shell outlives them all.
`python -m trainer.cluster.after_ranks FOLDER STATUS`, with the run's folder (or a sweep's, of which this job trains one
run) and srun's exit status, asks Slurm only when there is a reason to, and does not import torch. When it fails, the
job ends as it would without it. A script of one's own ends with it, too: see examples/srun.sbatch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache

from submitit.core.utils import DelayedSubmission, JobPaths

from trainer.attempt.signal_cause import Ending, comes_back, judge
from trainer.checkpoint.store import CheckpointStore
from trainer.cluster import run_folders
from trainer.config.schema import Launch
from trainer.records.attempt_record import AttemptRecord
from trainer.records.attempts import all_ends, begin_attempt, end_attempt, is_of, settle
from trainer.records.retry import FAILURES, goes_on
from trainer.rundir import RunDir
from trainer.say import say
from trainer.trainer import Trainer
from trainer.world import run_lock
from trainer.world.launchers import detect_world
from trainer.world.signals import STOP_SIGNALS
from trainer.world.slurm import Job, SlurmError, scontrol, show_job
from trainer.world.world import World

# How long a slurmctld may take to come back, or its backup to take over; the nodes are idle meanwhile.
PATIENCE_S = 180.0
POLL_S = 2.0
# Exit status of a rank that refuses its configuration: it has said why, and would again.
REFUSED = 2


def afterwards(run: RunDir, world: World, launch: Launch, status: int) -> None:
    """Requeue the job when the attempt that ended in it is to go on and nothing else brings it back."""
    at_work = run_lock.current_holder(run.lock)
    if at_work and not run_lock.belongs_to_job(at_work, world):
        return say(f"not requeued: another attempt is at work on this run ({at_work})")
    kept_step = cache(lambda: _newest_step(run))
    returns = _requeue(run, world, launch, status, bool(at_work), kept_step)
    if not at_work:  # else a rank 0 of this job lives, since only srun was killed or its node is cut off
        settle(run, kept_step, returned=world.job_id if returns else None)


def _requeue(
    run: RunDir, world: World, launch: Launch, status: int, at_work: bool, kept_step: Callable[[], int]
) -> bool:
    """Whether the job starts again, by itself or by our doing."""
    ends = all_ends(run, kept_step)
    end = next((end for end in reversed(ends) if is_of(end, world)), None)
    if end is not None and not (end["requeue"] or (end["reason"] == "lost" and goes_on(ends, launch))):
        if end["reason"] in FAILURES:
            _say_why_not(run, launch, end)
        return False
    job = _ask(world)
    if job is None:
        say("not requeued: Slurm does not answer")
        return False
    cause = judge(signal.SIGTERM, job, world.restart, 0, 0)
    if not cause.requeue:
        return comes_back(job, world.restart)
    if end is None and not at_work:
        end = _never_began(run, world, launch, status, cause, kept_step())
        if not end["requeue"]:
            _say_why_not(run, launch, end)
            return False
    say(f"requeueing job {world.job_id}: the attempt ended ({end['reason'] if end else 'srun'}), the run goes on")
    try:
        scontrol("requeue", world.job_id)
    except SlurmError as error:
        say(f"not requeued: {error}")
        return False
    return True


def _ask(world: World) -> Job | None:
    """What Slurm says of the job, waiting for a slurmctld that is about to come back."""
    deadline = time.monotonic() + PATIENCE_S
    while (job := show_job(world.job_id)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return job


def _never_began(run: RunDir, world: World, launch: Launch, status: int, cause: Ending, step: int) -> AttemptRecord:
    """Enter an attempt that ended before it began: a node that could not start it, a kill while Python was starting.

    Unless Slurm ended it, it counts as a failure, or this could go on for ever.
    """
    begin_attempt(run, world, step)
    error = f"srun exited with {status} before the attempt began"
    end = end_attempt(run, world, launch, cause.reason, step, step, error=error)
    assert end is not None, "nobody else is at work on the run"
    return end


def _say_why_not(run: RunDir, launch: Launch, end: AttemptRecord) -> None:
    say(
        f"not requeued: the attempt ended ({end['reason']}) and the next one would, too "
        f"(launch.max_failures={launch.max_failures}); `python launch.py resume {run.name}` tries it"
    )


def _newest_step(run: RunDir) -> int:
    """The step that the next attempt begins at. Reads the whole checkpoint to know, which may take a while."""
    newest = CheckpointStore(run.checkpoints).newest(warn=say)
    return newest.step if newest else 0


def _trainer(run: RunDir, world: World) -> Trainer:
    """What this job runs: in submitit's file, with what was asked of this job alone; else the run as it was started."""
    handed_over = JobPaths(run.logs, world.job_id).submitted_pickle
    if handed_over.exists():
        trainer = DelayedSubmission.load(handed_over).function
        assert isinstance(trainer, Trainer)
        return trainer
    return Trainer(run_folders.load(run))


def main(folder: str, status: int) -> int:
    """Do it for the run that this job trains; returns `status`, which is the job's."""
    for number in STOP_SIGNALS:  # that of the requeue itself among them
        signal.signal(number, signal.SIG_IGN)
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"  # it sees a job as its batch shell does, whatever has started the ranks
    run = RunDir(folder)
    if status == REFUSED or not run.path.exists():
        return status
    try:
        world = detect_world()
        trainer = _trainer(run, world)
        afterwards(trainer.run, world, trainer.config.launch, status)
    except Exception as error:  # whatever is wrong with this node or its disk, the log must have it on one line
        say(f"not requeued: {type(error).__name__}: {error}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

"""What the batch shell of a job runs after srun has failed: it requeues the job if the run should continue.

A rank that can still act records in attempts.jsonl how the attempt ended, and at a stop rank 0 requeues the job. But
all ranks may have been killed, and srun with them, or Slurm did not answer. The batch shell outlives them all.

`python -m trainer.cluster.after_ranks FOLDER STATUS` gets the folder of the run (or of a sweep, of which this job
trains one run) and the exit status of srun. It asks Slurm only if the answer matters, and does not import torch. If it
fails, the job ends as it would have without it. A user's own batch script can end with it, too: see
examples/srun.sbatch.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache

from submitit.core.utils import DelayedSubmission, JobPaths

from trainer.attempt.signal_cause import Ending, comes_back, judge
from trainer.checkpoint.store import CheckpointStore
from trainer.cluster import run_folders
from trainer.config.schema import Launch
from trainer.records.attempt_record import EndedAttempt
from trainer.records.attempts import (
    begin_attempt,
    belongs_to,
    end_attempt,
    ended_attempts,
    record_abandoned_attempts,
)
from trainer.records.retry import FAILURES, decide, why_not_requeued
from trainer.rundir import RunDir
from trainer.say import command, say
from trainer.trainer import Trainer
from trainer.world import run_lock
from trainer.world.launchers import detect_world
from trainer.world.signals import STOP_SIGNALS
from trainer.world.slurm import Job, SlurmError, scontrol, show_job
from trainer.world.world import World

# How long to wait for a slurmctld that restarts, or for its backup to take over. The nodes are idle meanwhile.
SLURMCTLD_WAIT_S = 180.0
POLL_S = 2.0
# Exit status of a rank that refuses its configuration. It has said why, and a retry would fail the same way.
REFUSED = 2


def after_ranks(run: RunDir, world: World, launch: Launch, status: int) -> None:
    """Requeue the job if its run should continue and nothing else starts the job again; record a lost attempt."""
    lock_holder = run_lock.current_holder(run.lock)
    if lock_holder and not run_lock.belongs_to_job(lock_holder, world):
        return say(f"not requeued: another attempt is at work on this run ({lock_holder})")
    rank_0_lives = bool(lock_holder)  # only srun was killed, or the node of rank 0 is cut off
    kept_step = cache(lambda: _newest_intact_step(run))
    starts_again = _requeue_if_needed(run, world, launch, status, rank_0_lives, kept_step)
    if not rank_0_lives:  # else rank 0 records the end itself
        record_abandoned_attempts(run, kept_step, requeued_job=world.job_id if starts_again else None)


def _requeue_if_needed(
    run: RunDir, world: World, launch: Launch, status: int, rank_0_lives: bool, kept_step: Callable[[], int]
) -> bool:
    """Returns whether Slurm starts the job again, because of this call or in any case."""
    ended = ended_attempts(run, kept_step)
    end = next((record for record in reversed(ended) if belongs_to(record, world)), None)
    if end is not None and not _should_requeue(ended, end, launch):
        if end["reason"] in FAILURES:
            _say_not_requeued(run, end, why_not_requeued(ended, launch))
        return False
    job = _ask_slurm(world)
    if job is None:
        say("not requeued: Slurm does not answer")
        return False
    cause = judge(signal.SIGTERM, job, world.restart, 0, 0)
    if not cause.requeue:
        return comes_back(job, world.restart)
    if end is None and not rank_0_lives:
        end = _record_failed_start(run, world, launch, status, cause, kept_step())
        if not end["requeue"]:
            _say_not_requeued(run, end, why_not_requeued([*ended, end], launch))
            return False
    say(f"requeueing job {world.job_id}: the attempt ended ({end['reason'] if end else 'srun'}), the run continues")
    try:
        scontrol("requeue", world.job_id)
    except SlurmError as error:
        say(f"not requeued: {error}")
        return False
    return True


def _should_requeue(ended: Sequence[EndedAttempt], end: EndedAttempt, launch: Launch) -> bool:
    """What was decided when the attempt ended. For a lost attempt there was no rank left to decide."""
    return end["requeue"] or (end["reason"] == "lost" and decide(ended, launch).requeue)


def _ask_slurm(world: World) -> Job | None:
    """What Slurm says about the job, None if it does not answer for SLURMCTLD_WAIT_S."""
    deadline = time.monotonic() + SLURMCTLD_WAIT_S
    while (job := show_job(world.job_id)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return job


def _record_failed_start(
    run: RunDir, world: World, launch: Launch, status: int, cause: Ending, kept_step: int
) -> EndedAttempt:
    """Record an attempt that ended before it began: a node could not start it, or Python was killed while it started.

    Unless Slurm ended it, it counts as a failure: otherwise a job that cannot start would be requeued without end.
    """
    begin_attempt(run, world, kept_step)
    error = f"srun exited with {status} before the attempt began"
    end = end_attempt(run, world, launch, cause.reason, kept_step, kept_step, error=error)
    assert end is not None, "no rank of the run lives that could have recorded it first"
    return end


def _say_not_requeued(run: RunDir, end: EndedAttempt, why: str) -> None:
    resume = command(f"resume {shlex.quote(str(run.path))}")
    say(f"not requeued: the attempt ended ({end['reason']}): {why}; `{resume}` tries again")


def _newest_intact_step(run: RunDir) -> int:
    """The step that the next attempt begins at. Reads whole checkpoints to know, which may take a while."""
    newest = CheckpointStore(run.checkpoints).newest(warn=say)
    return newest.step if newest else 0


def _trainer_of_job(run: RunDir, world: World) -> Trainer:
    """What this job runs: submitit's file has it, with options given to this job only; else the run as configured."""
    pickled = JobPaths(run.logs, world.job_id).submitted_pickle
    if pickled.exists():
        trainer = DelayedSubmission.load(pickled).function
        assert isinstance(trainer, Trainer)
        return trainer
    return Trainer(run_folders.load(run))


def main(folder: str, status: int) -> int:
    """Call `after_ranks` for the run that this job trains; returns `status`, with which the job ends."""
    for number in STOP_SIGNALS:  # the requeue itself sends SIGTERM
        signal.signal(number, signal.SIG_IGN)
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"  # for any launcher: look at the job as its batch shell does
    run = RunDir(folder)
    if status == REFUSED or not run.path.exists():
        return status
    try:
        world = detect_world()
        trainer = _trainer_of_job(run, world)
        after_ranks(trainer.run, world, trainer.config.launch, status)
    except Exception as error:  # e.g. of the node or its disk: one line in the log must say so
        say(f"not requeued: {type(error).__name__}: {error}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

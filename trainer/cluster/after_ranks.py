"""What the batch shell of a job runs after srun has failed: it requeues the job if the run should continue.

A rank that can still act records in attempts.jsonl how the attempt ended, and at a stop rank 0 requeues the job. But
all ranks may have been killed, and srun with them, or Slurm did not answer. The batch shell outlives them all.

`python -m trainer.cluster.after_ranks FOLDER STATUS [LINE]` gets the folder of the run (or of a sweep, of which this
job trains one run) and the exit status of srun, or that of a line of launch.setup and its number. It asks Slurm only if
the answer matters, and does not import torch. If it fails, the job ends as it would have without it. A user's own batch
script can end with it, too: see examples/srun.sbatch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache

from submitit.core.utils import DelayedSubmission, JobPaths

from trainer.attempt.finished import finish_of
from trainer.attempt.signal_cause import comes_back, judge
from trainer.checkpoint.store import CheckpointStore
from trainer.cluster import run_config, trust
from trainer.config.schema import Launch
from trainer.records.attempt_record import EndedAttempt, Reason
from trainer.records.attempts import (
    begin_attempt,
    belongs_to,
    correct_lost_attempt,
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
from trainer.world.slurm import REPLACED, Job, SlurmError, has_scontrol, requeue_job, show_job
from trainer.world.slurm import command as slurm_command
from trainer.world.world import World

# How long to wait for a slurmctld that restarts, or for its backup to take over. The nodes are idle meanwhile.
SLURMCTLD_WAIT_S = 180.0
POLL_S = 2.0
# Exit status of `python -m trainer` where it refuses its configuration. It has said why, and a retry would fail the
# same way. In a job that Laststep submitted it is srun's, which did not find the program.
REFUSED = 2


def after_ranks(run: RunDir, world: World, launch: Launch, status: int, setup_line: int | None = None) -> None:
    """Requeue the job if its run should continue and nothing else starts the job again; record a lost attempt.

    `status` is that of srun, or of the line of launch.setup with this number, from 1.
    """
    lock_holder = run_lock.current_holder(run.lock)
    if lock_holder and not run_lock.belongs_to_job(lock_holder, world):
        return say(f"not requeued: another attempt is at work on this run ({lock_holder})")
    rank_0_lives = bool(lock_holder)  # only srun was killed, or the node of rank 0 is cut off
    kept_step = cache(lambda: _newest_step(run))
    failed_start = _why_not_started(run, world, launch, status, setup_line)
    starts_again = _requeue_if_needed(run, world, launch, failed_start, rank_0_lives, kept_step)
    if rank_0_lives:  # it records the end itself
        return
    record_abandoned_attempts(run, kept_step, requeued_job=world.job_id if starts_again else None)
    if not starts_again:  # else the next attempt reads the checkpoints, and corrects the record
        correct_lost_attempt(run, lambda: _newest_intact_step(run))


def _requeue_if_needed(
    run: RunDir, world: World, launch: Launch, failed_start: str, rank_0_lives: bool, kept_step: Callable[[], int]
) -> bool:
    """Returns whether Slurm starts the job again, because of this call or in any case."""
    ended = ended_attempts(run, kept_step)
    end = next((record for record in reversed(ended) if belongs_to(record, world)), None)
    if end is not None and not _should_requeue(ended, end, launch):
        if end["reason"] in FAILURES:
            _say_not_requeued(run, end, why_not_requeued(ended, launch))
        elif end["reason"] == "cancelled" and _is_submitted(run, world):
            _end_as_cancelled(world)
        return False
    job = _ask_slurm(world)
    if job is None:
        watch = command(f"resume {shlex.quote(str(run.path))} --watch")
        say(f"not requeued: Slurm does not answer on this node; where it does, `{watch}` continues the run")
        return False
    cause = judge(signal.SIGTERM, job, world.restart, 0, 0)
    if not cause.requeue:
        returns = comes_back(job, world.restart)
        if end is None and not rank_0_lives and not returns:
            _record_without_ranks(run, world, launch, cause.reason, cause.error, kept_step())
        return returns
    if end is None and not rank_0_lives:
        # Unless Slurm ended it, it counts as a failure: else a job that cannot start would be requeued without end.
        end = _record_without_ranks(run, world, launch, cause.reason, failed_start, kept_step())
        if not end["requeue"]:
            _say_not_requeued(run, end, why_not_requeued([*ended, end], launch))
            return False
    say(f"requeueing job {world.job_id}: the attempt ended ({end['reason'] if end else 'srun'}), the run continues")
    try:
        requeue_job(world.job_id)
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
    while (job := show_job(world.job_id)) is None and time.monotonic() < deadline and has_scontrol():
        time.sleep(POLL_S)
    return job


def _end_as_cancelled(world: World) -> None:
    """Have Slurm record the job of a cancelled run as CANCELLED. By its exit status it would be FAILED."""
    try:
        if (show_job(world.job_id) or {}).get("JobState") != REPLACED:
            slurm_command("scancel", world.job_id)
    except SlurmError as error:
        say(f"Slurm records this job as failed, although the run was cancelled: {error}")


def _why_not_started(run: RunDir, world: World, launch: Launch, status: int, setup_line: int | None) -> str:
    """Why no attempt began, if none did: a line of launch.setup, launch.python, or what the log ends with."""
    setup = "\n".join(launch.setup).splitlines()
    if setup_line is not None and setup_line <= len(setup):
        return f"line {setup_line} of launch.setup exited with {status}: {setup[setup_line - 1].strip()}"
    program = shlex.split(launch.python)[0] if launch.python else sys.executable
    if shutil.which(program) is None:
        return f"launch.python: {program} not found on {world.hosts[0]}"
    return f"srun exited with {status} before the attempt began{_last_words(run, world)}"


def _last_words(run: RunDir, world: World) -> str:
    """The last line of this start in the job's log, and only if there is no other one of srun."""
    log = run.logs / f"{world.job_id}_0_log.out"
    text = log.read_text(errors="replace")[-10_000:] if log.exists() else ""
    ours = max((text.rfind(mark) for mark in ("[laststep ", "submitit ")), default=-1)
    lines = [line.strip() for line in text[max(0, ours) :].splitlines()[ours >= 0 :] if line.strip()]
    words = [line for line in lines if not line.startswith("srun:")] or lines
    return f": {words[-1][:300]}" if words else ""


def _record_without_ranks(
    run: RunDir, world: World, launch: Launch, reason: Reason, error: str | None, kept_step: int
) -> EndedAttempt:
    """Record an attempt that ended before it began: a node could not start it, or Python was killed while it started,
    or it was cancelled."""
    begin_attempt(run, world, kept_step)
    end = end_attempt(run, world, launch, reason, kept_step, kept_step, error=error)
    assert end is not None, "no rank of the run lives that could have recorded it first"
    return end


def _say_not_requeued(run: RunDir, end: EndedAttempt, why: str) -> None:
    resume = command(f"resume {shlex.quote(str(run.path))}")
    say(f"not requeued: the attempt ended ({end['reason']}): {why}; `{resume}` tries again")


def _newest_step(run: RunDir) -> int:
    """The step that the next attempt begins at, unless a checkpoint of the right size is damaged all the same. The job
    is requeued first: to hash a large checkpoint may take longer than this shell lives."""
    newest = next(CheckpointStore(run.checkpoints).candidates(warn=say), None)
    return newest.step if newest else 0


def _newest_intact_step(run: RunDir) -> int:
    """The step that the next attempt begins at. Reads whole checkpoints, which may take minutes."""
    newest = CheckpointStore(run.checkpoints).newest(warn=say)
    return newest.step if newest else 0


def _is_submitted(run: RunDir, world: World) -> bool:
    """Whether Laststep submitted this job; else the batch script is the user's."""
    return JobPaths(run.logs, world.job_id).submitted_pickle.exists()


def _trainer_of_job(run: RunDir, world: World) -> Trainer:
    """What this job runs: submitit's file has it, with options given to this job only; else the run as configured."""
    pickle = JobPaths(run.logs, world.job_id).submitted_pickle
    trust.check(run, [run.config, run.submissions, run.logs, pickle])
    if _is_submitted(run, world):
        trainer = DelayedSubmission.load(pickle).function
        assert isinstance(trainer, Trainer)
        return trainer
    return Trainer(run_config.load(run, warn=say))


def main(folder: str, status: int, setup_line: int | None = None) -> int:
    """Call `after_ranks` for the run that this job trains; returns `status`, with which the job ends."""
    for number in STOP_SIGNALS:  # the requeue itself sends SIGTERM
        signal.signal(number, signal.SIG_IGN)
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"  # for any launcher: look at the job as its batch shell does
    run = RunDir(folder)
    if not run.path.exists():
        return status
    try:
        world = detect_world()
        if status == REFUSED and not _is_submitted(run, world):
            return status
        trainer = _trainer_of_job(run, world)
        if finish_of(trainer.run, trainer.config):
            return status
        after_ranks(trainer.run, world, trainer.config.launch, status, setup_line)
    except Exception as error:  # e.g. of the node or its disk: one line in the log must say so
        say(f"not requeued: {type(error).__name__}: {error}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))

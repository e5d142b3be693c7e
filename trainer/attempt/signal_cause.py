"""Why a signal came, by what Slurm says of the job, and so whether the job comes back by itself.

Seen on Slurm 22.05 (`scontrol show job`, unchanged from the moment of the signal to 3 s after it):

    cause                                  JobState    Restarts   other                        comes back by itself
    scontrol requeue, preemption, a node   COMPLETING  one more                                yes
        that fails
    preemption with GraceTime, first       RUNNING     the same   PreemptTime set              only if it outlives the
                                                                                               grace, and not of CANCEL
    preemption with PreemptMode=CANCEL     COMPLETING  the same   EndTime = PreemptTime        no
    the same after a GraceTime             COMPLETING  the same   TimeLimit, PreemptTime set   no
    time limit                             COMPLETING  the same   Reason=TimeLimit             no
    the batch shell was killed             COMPLETING  the same   Reason=JobLaunchFailure      no
    scancel                                COMPLETING  the same                                no, and must not
    scancel within a GraceTime             COMPLETING  the same   EndTime after PreemptTime    no, and must not
    scancel --signal, kill, srun after     RUNNING     the same                                no
        another rank's death

`scontrol requeue` brings back all of them, as long as some process of the job is left to call it. A SIGTERM to a job
that still runs is no cancellation: on a busy cluster slurmctld repeats, a minute later, the order to end the ranks of
an attempt that failed, and it hits those of the next one, whose step has the same number (seen). After a slurmctld that
was killed has come back, a job may start again with the same Restarts: it writes its state down every 5 s.
"""

from __future__ import annotations

import signal
import time
from typing import NamedTuple

from trainer.records.attempt_record import Reason
from trainer.world.slurm import NEVER, Job, show_job, unix_time
from trainer.world.world import World

# Slurm looks at time limits seldom, so that `--signal=USR2@S` may come up to 60 s early (man sbatch).
EARLY_S = 60
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Ending(NamedTuple):
    """Why an attempt stopped, as attempts.jsonl says it, and whether the run goes on only if we requeue the job."""

    reason: Reason
    requeue: bool
    error: str | None = None


def ending(number: signal.Signals, world: World, signal_delay_s: int) -> Ending:
    """Why the signal came. Asks Slurm, where this is a Slurm job."""
    job = show_job(world.job_id) if world.on_slurm else None
    if job is None:
        # Outside Slurm, or when it does not answer: the signal's own meaning.
        wants_requeue = number in USER_SIGNALS
        return Ending("preempted" if wants_requeue or world.on_slurm else "cancelled", wants_requeue)
    return judge(number, job, world.restart, signal_delay_s, time.time())


def judge(number: signal.Signals, job: Job, restart: int, signal_delay_s: int, now: float) -> Ending:
    """`ending`, from what `scontrol show job` says: the table above, as code."""
    preempted_at = unix_time(job.get("PreemptTime", ""))
    if comes_back(job, restart):
        return Ending("preempted", requeue=False)
    if job.get("Reason") == "TimeLimit":
        return Ending("timeout" if preempted_at == NEVER else "preempted", requeue=True)
    if job.get("JobState") != "RUNNING":
        if job.get("Reason") == "JobLaunchFailure":
            return Ending("failed", requeue=True, error="the job's batch shell was killed")
        at_once = unix_time(job.get("EndTime", "")) <= preempted_at + 1 < NEVER
        return Ending("preempted", requeue=True) if at_once else Ending("cancelled", requeue=False)
    if preempted_at < NEVER:
        return Ending("preempted", requeue=True)
    if number in USER_SIGNALS:
        left_s = unix_time(job.get("EndTime", "")) - now
        return Ending("timeout" if left_s <= signal_delay_s + EARLY_S else "preempted", requeue=True)
    if number == signal.SIGINT:  # typed at srun
        return Ending("cancelled", requeue=False)
    return Ending("failed", requeue=True, error=f"{number.name} came, though Slurm had not ended the job")


def comes_back(job: Job, restart: int) -> bool:
    """Whether the job, in which this is the start after `restart` others, starts again in any case."""
    return int(job.get("Restarts", restart)) > restart

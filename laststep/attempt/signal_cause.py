"""Why a signal was sent, judged by what Slurm says about the job, and so whether the job restarts by itself.

Seen on Slurm 22.05 (`scontrol show job`, unchanged from the moment of the signal to 3 s after it):

    cause                                  JobState    Restarts   other                        restarts by itself
    scontrol requeue, preemption, a node   COMPLETING  one more                                yes
        that fails
    preemption with GraceTime, first       RUNNING     the same   PreemptTime set              only if it outlives the
                                                                                               grace, not with CANCEL
    preemption with PreemptMode=CANCEL     COMPLETING  the same   EndTime = PreemptTime        no
    the same after a GraceTime             COMPLETING  the same   TimeLimit, PreemptTime set   no
    time limit                             COMPLETING  the same   Reason=TimeLimit             no
    the batch shell was killed             COMPLETING  the same   Reason=JobLaunchFailure      no
    scancel                                COMPLETING  the same                                no, and must not
    scancel within a GraceTime             COMPLETING  the same   EndTime after PreemptTime    no, and must not
    scancel --signal, kill, srun after     RUNNING     the same                                no
        another rank's death

SIGINT has one meaning in all of these rows: the user has cancelled the run.

RUNNING stands for all of UNENDED: during the first two signals of a preemption with GraceTime, SIGCONT and SIGTERM, the
state may be SIGNALING (seen).

`scontrol requeue` restarts the job in every one of these cases, as long as a process of the job is left to call it.

A SIGTERM to a job that is still running does not mean that it was cancelled. On a busy cluster slurmctld repeats, a
minute later, the order to end the ranks of an attempt that failed, and it hits those of the next attempt, whose step
has the same number (seen). After slurmctld was killed and restarted, a job may restart with an unchanged Restarts:
slurmctld writes its state to disk every 5 s.
"""

from __future__ import annotations

import signal
import time
from typing import Literal, NamedTuple

from laststep.ranks.process import SUPERVISED, children, identity
from laststep.ranks.slurm import NEVER, REPLACED, UNENDED, Job, kill_limits, show_job, unix_time
from laststep.ranks.world import World

# Slurm checks time limits only now and then, so `--signal=USR2@S` may be sent up to 60 s early (man sbatch).
EARLY_S = 60
SHELL_KILLED = "the job's batch shell was killed"
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Ending(NamedTuple):
    """Why an attempt stopped, as attempts.jsonl says it, and whether the run continues only if we requeue the job."""

    reason: Literal["preempted", "cancelled", "timeout", "failed"]
    requeue: bool
    error: str | None = None
    by_srun: bool = False  # whether srun may have sent it, since a task was killed
    blames_host: bool = False  # whether this host is to blame, so that the ranks start again under --local


def ending(number: signal.Signals, world: World, signal_delay_s: int) -> Ending:
    """Why this signal was sent. Asks Slurm if this is a Slurm job."""
    job = show_job(world.job_id) if world.on_slurm else None
    if job is None:
        return usual_ending(number, world)
    ahead_s = kill_limits().clock_ahead_s if number in USER_SIGNALS else 0.0  # else nothing depends on it
    return judge(number, job, world.restart, signal_delay_s, time.time() + ahead_s)


def usual_ending(number: signal.Signals, world: World) -> Ending:
    """The usual meaning of the signal, outside Slurm or where Slurm does not answer."""
    if number == signal.SIGINT:  # which Slurm never sends by itself
        return Ending("cancelled", requeue=False)
    if number == signal.SIGTERM and (orphaned := _orphaned(world)):  # it comes from the kernel, see `die_with_parent`
        return orphaned
    wants_requeue = number in USER_SIGNALS
    return Ending("preempted" if wants_requeue or world.on_slurm else "cancelled", wants_requeue)


def _orphaned(world: World) -> Ending | None:
    """What to record if a process above the ranks of --local was killed: nobody has cancelled the run. The pid of the
    command that started them is in the name of its job."""
    pid = world.job_id.rpartition("-")[2]
    if world.launcher != "submitit-local" or not world.supervised or not pid.isdecimal():
        return None
    if not identity(int(pid)):
        return Ending("failed", requeue=False, error="the command that started the ranks was killed")
    if len(children(int(pid), SUPERVISED)) < world.size:
        return Ending("failed", requeue=False, error="the parent process of a rank was killed", blames_host=True)
    return None


def judge(number: signal.Signals, job: Job, restart: int, signal_delay_s: int, now: float) -> Ending:
    """`ending` for a given output of `scontrol show job`: the table above, as code. `now` is in seconds since 1970, by
    the controller's clock."""
    if job.get("JobState") == REPLACED:
        return Ending("failed", requeue=False, error="Slurm has forgotten this job, and given its id to another one")
    if number == signal.SIGINT:  # `cancel`, or Ctrl-C in the terminal of srun; whatever Slurm has done meanwhile
        return Ending("cancelled", requeue=False)
    preempted_at = unix_time(job.get("PreemptTime", ""))
    if comes_back(job, restart):
        return Ending("preempted", requeue=False)
    if job.get("Reason") == "TimeLimit":
        return Ending("timeout" if preempted_at == NEVER else "preempted", requeue=True)
    if job.get("JobState") not in UNENDED:
        if job.get("Reason") == "JobLaunchFailure":
            return Ending("failed", requeue=True, error=SHELL_KILLED)
        at_once = unix_time(job.get("EndTime", "")) <= preempted_at + 1 < NEVER
        return Ending("preempted", requeue=True) if at_once else Ending("cancelled", requeue=False)
    if preempted_at < NEVER:
        return Ending("preempted", requeue=True)
    if number in USER_SIGNALS:
        left_s = unix_time(job.get("EndTime", "")) - now
        return Ending("timeout" if left_s <= signal_delay_s + EARLY_S else "preempted", requeue=True)
    error = f"received {number.name}, though Slurm had not ended the job"
    return Ending("failed", requeue=True, error=error, by_srun=True)


def comes_back(job: Job, restart: int) -> bool:
    """Whether Slurm restarts the job by itself. `restart` counts the restarts before this attempt."""
    return int(job.get("Restarts", restart)) > restart

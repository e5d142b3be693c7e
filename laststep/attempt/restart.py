"""Why a signal ended an attempt, what follows, and who carries it out: one decision, asked here by all who can act.

`ending` says what a signal means: Slurm sends SIGTERM for a preemption, a time limit, a requeue and a cancel.

Any of three kinds of processes may be the last that lives: a rank, the supervisors of the ranks, the batch shell of the
job. Each gathers what it knows, asks here, and does what it is told. The attempt's record and the run's budgets come
first (laststep/records/retry.py). Then Slurm is asked about the job, and `what_follows` decides:

    the budgets say     Slurm says of the job                      what follows
    END                                                            END
    RESTART, REQUEUE    it starts again by itself                  SLURM_REQUEUES
                        it has ended (cancelled, replaced)         END
    RESTART             it runs on, its time limit is not near,    RESTART_IN_STEP, if the supervisors ask
                        its nodes are fit                          NEW_STEP, if a shell that can start ranks asks
    RESTART, REQUEUE    anything else                              REQUEUE

Supervisors that do not restart their ranks end. Then srun ends, and the batch shell, which asks after them, requeues.

After a fault a rank requeues the job itself only where nobody else will: `who_acts`.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from laststep.config.schema import Launch
from laststep.ranks.fault import Fault
from laststep.ranks.process import SUPERVISED, children_of, identity
from laststep.ranks.slurm import (
    AGAIN_S,
    NEVER,
    ON_NODES,
    REPLACED,
    UNENDED,
    Job,
    SlurmError,
    Unanswered,
    ask_patiently,
    kill_limits,
    requeue_job,
    show_job,
    unix_time,
)
from laststep.ranks.world import World
from laststep.records.retry import Decision, Next

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


def revoked(number: signal.Signals, world: World) -> Ending | None:
    """Why the job must not be requeued after all, although this signal had asked for that a moment ago: it has been
    cancelled since, or Slurm requeues it by itself. None if it must be, and where Slurm does not answer. Asks Slurm."""
    if number == signal.SIGINT:
        return Ending("cancelled", requeue=False)
    job = show_job(world.job_id) if world.on_slurm else None
    now = None if job is None else judge(number, job, world.restart, 0, 0)
    return None if now is None or now.requeue else now


def usual_ending(number: signal.Signals, world: World) -> Ending:
    """The usual meaning of the signal, outside Slurm or where Slurm does not answer."""
    if number == signal.SIGINT:  # which Slurm never sends by itself
        return Ending("cancelled", requeue=False)
    if number == signal.SIGTERM and (orphaned := _orphaned(world)):  # it comes from the kernel, see `die_with_parent`
        return orphaned
    wants_requeue = number in USER_SIGNALS
    by_slurm = world.on_slurm or ON_NODES in os.environ
    return Ending("preempted" if wants_requeue or by_slurm else "cancelled", wants_requeue)


def _orphaned(world: World) -> Ending | None:
    """What to record if a process above the ranks of --local was killed: nobody has cancelled the run. The pid of the
    command that started them is in the name of its job."""
    pid = world.job_id.rpartition("-")[2]
    if world.launcher != "submitit-local" or not world.supervised or not pid.isdecimal() or ON_NODES in os.environ:
        return None
    if not identity(int(pid)):
        return Ending("failed", requeue=False, error="the command that started the ranks was killed")
    if len(children_of(int(pid), SUPERVISED)) < world.size:
        return Ending("failed", requeue=False, error="the parent process of a rank was killed", blames_host=True)
    return None


def judge(number: signal.Signals, job: Job, restart: int, signal_delay_s: int, now: float) -> Ending:
    """`ending` for a given output of `scontrol show job`. `now` is in seconds since 1970, by
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


def insist_on_requeue(world: World, patience_s: float) -> None:
    """Requeue the job of this process, once. While Slurm does not answer, it is asked again for this long. It may have
    done it all the same, so it is not told twice before it has shown the job. Raises SlurmError if it refuses, stays
    silent, or has ended the job meanwhile."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return requeue_job(world.job_id)
        except SlurmError as error:
            job = ask_patiently(world.job_id, deadline - time.monotonic())
            if job is not None and (comes_back(job, world.restart) or job.get("JobState") == "PENDING"):
                return
            if job is None or not isinstance(error, Unanswered) or time.monotonic() > deadline:
                raise
            if not judge(signal.SIGTERM, job, world.restart, 0, 0).requeue:
                raise
        time.sleep(AGAIN_S)


class Follows(enum.Enum):
    """What follows the end of an attempt."""

    RESTART_IN_STEP = "the supervisors fork the ranks again, in the same step of Slurm"
    NEW_STEP = "the batch shell starts the ranks again, in the same allocation"
    REQUEUE = "the job goes back to the queue"
    SLURM_REQUEUES = "the job is in the queue already"
    END = "the job ends"


class Verdict(NamedTuple):
    """What follows, and why nothing better does; empty where there is nothing to say."""

    follows: Follows
    why: str = ""


def what_follows(
    policy: Decision,
    job: Job,
    restart: int,
    launch: Launch,
    asker_starts: Literal[Follows.RESTART_IN_STEP, Follows.NEW_STEP] | None,
    obstacle: Callable[[], str],
) -> Verdict:
    """The table above.

    `policy` is what the records say, `job` what Slurm says about the job, which had been requeued `restart` times when
    the attempt began. `asker_starts`: how the process that asks can start the ranks again, None if it cannot.
    `obstacle` looks at the nodes, and returns why the ranks cannot start on them; it is called only if that matters.
    """
    cause = judge(signal.SIGTERM, job, restart, 0, 0)
    if not cause.requeue:
        return Verdict(Follows.SLURM_REQUEUES if comes_back(job, restart) else Follows.END)
    if policy.what is Next.END:
        return Verdict(Follows.END, policy.why)
    if policy.what is Next.REQUEUE or asker_starts is None or cause.reason != "failed":
        return Verdict(Follows.REQUEUE)
    why = _why_too_late(job, launch) or obstacle()
    return Verdict(Follows.REQUEUE, why) if why else Verdict(asker_starts)


def _why_too_late(job: Job, launch: Launch) -> str:
    """Why nothing can start in the job's allocation any more; empty if it can."""
    if job.get("JobState") not in UNENDED:
        return f"the job is {job.get('JobState')}"
    ends_at = unix_time(job.get("EndTime", ""))
    # By the controller's clock: on a node that is ahead of it, the time limit would always seem to be near.
    left_s = ends_at - time.time() - (kill_limits().clock_ahead_s if ends_at < NEVER else 0.0)
    if left_s <= launch.signal_delay_s + EARLY_S:  # the ranks that received its warning have ended
        return "its time limit is near"
    return ""


class Actor(enum.Enum):
    """Who acts on the record of a fault."""

    RANK = "the rank that recorded it"
    SUPERVISORS = "the supervisors of this step; if they do not start the ranks again, the batch shell"
    SHELL = "the batch shell, once srun has ended; under --local the command"
    LAUNCHER = "torchrun"


def who_acts(world: World, fault: Fault, shell_killed: bool, srun_ends: bool) -> Actor:
    """Who acts after this fault. `shell_killed`: Slurm says that the batch shell is gone. `srun_ends`: the batch shell
    was asked to end srun, which may otherwise wait forever for a silent rank. After a signal torchrun restarts nothing.
    """
    if shell_killed:
        return Actor.RANK
    if world.step_restarts is not None:
        return Actor.SUPERVISORS
    if (world.by_submitit or world.supervised) and (srun_ends or not fault.silent):
        return Actor.SHELL
    if world.launcher_restarts and fault.reason != "signal":
        return Actor.LAUNCHER
    return Actor.RANK

"""What follows the end of an attempt, and who carries it out: one decision, asked here by all who can act on it.

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
import signal
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from laststep.attempt.grace import EARLY_S, comes_back, judge
from laststep.config.schema import Launch
from laststep.ranks.fault import Fault
from laststep.ranks.slurm import UNENDED, Job, unix_time
from laststep.ranks.world import World
from laststep.records.retry import Decision, Next


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
    left_s = unix_time(job.get("EndTime", "")) - time.time()
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

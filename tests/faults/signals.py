"""Faults with a warning signal: requeue, preemption, the time limit, scancel, and signals sent by hand. None may cost a
step."""

from __future__ import annotations

import contextlib
import signal
import time

from tests.faults.plan import Fault, Inject, Moment, Needs, Return, Shot
from tests.faults.site import BATCH, NOTICE, SCAVENGE, URGENT
from tests.faults.victim import Missed, Victim

AT_WORK = (Moment.RESTORE, Moment.STEP, Moment.VALIDATION, Moment.SAVE)
WITH_RANKS = (Moment.START, *AT_WORK)
ALWAYS = (*WITH_RANKS, Moment.STOP)
TIME_MIN = 60  # of run.yaml
SIGNAL_EARLY_S = 120.0  # the limit is at most a minute away, and Slurm checks limits every 30 s


def requeue(victim: Victim, shot: Shot) -> None:
    """Requeue the job, as an administrator does."""
    victim.slurm("scontrol", "requeue", victim.job.job_id)


def preempt(victim: Victim, shot: Shot) -> None:
    """A job with a higher priority takes the nodes for a second."""
    nodes = victim.job.nodes
    if not nodes:
        raise Missed("the job has no nodes")
    words = ("--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    victim.slurm("sbatch", "-p", URGENT, "-w", nodes, "-J", "urgent", *words)


def user_signal(victim: Victim, shot: Shot) -> None:
    """Send SIGUSR2 to the job, which is how submitit's users ask for a requeue."""
    victim.slurm("scancel", "--signal", "USR2", victim.job.job_id)


def rank_signal(number: signal.Signals, times: int = 1) -> Inject:
    """Send a signal to one rank alone."""

    def inject(victim: Victim, shot: Shot) -> None:
        pid = victim.rank(victim.pick(shot.aim)).pid
        for _ in range(times):
            victim.signal(number, pid)
            time.sleep(0.05 * shot.aim)

    return inject


def two_signals(victim: Victim, shot: Shot) -> None:
    """Send SIGUSR2 to one rank and SIGTERM to another or the same, as when a user and Slurm act at the same time."""
    first, second = victim.rank(victim.pick(shot.aim)), victim.rank(victim.pick(shot.aim * 7 % 1))
    victim.signal(signal.SIGUSR2, first.pid)
    victim.signal(signal.SIGTERM, second.pid)


def cancel(victim: Victim, shot: Shot) -> None:
    """Cancel the job: the run must not continue until its user resumes it."""
    victim.slurm("scancel", victim.job.job_id)


def time_limit(victim: Victim, shot: Shot) -> float:
    """Lower the time limit to the next full minute, and restore it after the warning."""
    job_id, attempt = victim.job.job_id, victim.rank(0).attempt
    # Elapsed time as [[hours:]minutes:]seconds; no run takes days.
    parts = victim.slurm("squeue", "-h", "-j", job_id, "-o", "%M").strip().split(":")
    elapsed_s = sum(int(part) * 60**place for place, part in enumerate(reversed(parts)))
    limit = elapsed_s // 60 + 1
    victim.slurm("scontrol", "update", f"JobId={job_id}", f"TimeLimit={limit}")
    before = victim.log.last("stop")
    victim.wait(lambda: victim.log.last("stop") is not before, SIGNAL_EARLY_S, "the time limit's signal did not come")
    struck = time.monotonic()
    victim.wait(lambda: all(p.attempt != attempt for p in victim.ranks().values()), 60, "the ranks did not end")
    with contextlib.suppress(Missed):  # it may continue as another job, which has a limit of its own
        victim.slurm("scontrol", "update", f"JobId={job_id}", f"TimeLimit={TIME_MIN}")
    return struck


def _in(partition: str) -> Needs:
    return lambda setting: setting.partition == partition


EITHER, AGAIN = Return.EITHER, Moment.AGAIN
FAULTS = [
    Fault("requeue", "`scontrol requeue`", requeue, (*ALWAYS, AGAIN)),
    Fault("preempt", "preemption with requeue", preempt, (*ALWAYS, AGAIN), needs=_in(BATCH)),
    Fault("preempt-notice", "preemption with requeue after a GraceTime", preempt, (*ALWAYS, AGAIN), needs=_in(NOTICE)),
    Fault(
        "preempt-cancel", "preemption with cancel after a GraceTime", preempt, (*WITH_RANKS, AGAIN), needs=_in(SCAVENGE)
    ),
    Fault("usr2", "`scancel --signal USR2`", user_signal, (*ALWAYS, AGAIN)),
    Fault("usr2-rank", "SIGUSR2 to one rank", rank_signal(signal.SIGUSR2), (*ALWAYS, AGAIN)),
    Fault("term-rank", "SIGTERM to one rank", rank_signal(signal.SIGTERM), (*ALWAYS, AGAIN), returns=EITHER),
    Fault("term-twice", "SIGTERM twice to one rank", rank_signal(signal.SIGTERM, 2), (*ALWAYS, AGAIN), returns=EITHER),
    Fault("int-rank", "SIGINT (Ctrl-C) to one rank", rank_signal(signal.SIGINT), (*ALWAYS, AGAIN), returns=EITHER),
    Fault("usr2-and-term", "SIGUSR2 to one rank and SIGTERM to one", two_signals, (*ALWAYS, AGAIN), returns=EITHER),
    Fault("scancel", "`scancel`", cancel, (*WITH_RANKS, Moment.HOLD, AGAIN), returns=Return.USER),
    Fault("time-limit", "the time limit", time_limit, (Moment.STEP,), slow=True),
]

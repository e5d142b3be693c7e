"""What Slurm says of the job that this process is in, and so why a signal came and whether the job comes back.

Seen on Slurm 22.05 (`scontrol show job`, unchanged from the moment of the signal to 3 s after it):

    cause                               JobState    Restarts   other             comes back by itself
    scontrol requeue, preemption        COMPLETING  one more                     yes
    preemption with GraceTime, first    RUNNING     the same   PreemptTime set   only if it outlives the grace
    time limit                          COMPLETING  the same   Reason=TimeLimit  no
    scancel                             COMPLETING  the same                     no, and must not
    scancel --signal, kill              RUNNING     the same                     no
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from dataclasses import dataclass

from trainer.world.detect import World

# Slurm looks at time limits seldom, so that `--signal=USR2@S` may come up to 60 s early (man sbatch).
EARLY_S = 60
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Ending:
    """Why an attempt stopped, as attempts.jsonl says it, and whether the run goes on only if we requeue the job."""

    reason: str
    requeue: bool


def ending(number: signal.Signals, world: World, signal_delay_s: int) -> Ending:
    """Why the signal came. Asks Slurm, where this is a Slurm job."""
    job = _show_job(world.job_id) if world.on_slurm else None
    if job is None:
        # Outside Slurm, or when it does not answer: the signal's own meaning.
        wants_requeue = number in USER_SIGNALS
        return Ending("preempted" if wants_requeue or world.on_slurm else "cancelled", wants_requeue)
    return judge(number, job, world.restart, signal_delay_s, time.time())


def judge(number: signal.Signals, job: dict[str, str], restart: int, signal_delay_s: int, now: float) -> Ending:
    """`ending`, from what `scontrol show job` says: the table above, as code."""
    if int(job.get("Restarts", restart)) > restart:
        return Ending("preempted", requeue=False)
    if job.get("Reason") == "TimeLimit":
        return Ending("timeout", requeue=True)
    if job.get("JobState") == "COMPLETING":
        return Ending("cancelled", requeue=False)
    if number in USER_SIGNALS:
        left_s = _unix_time(job.get("EndTime", "")) - now
        return Ending("timeout" if left_s <= signal_delay_s + EARLY_S else "preempted", requeue=True)
    if _unix_time(job.get("PreemptTime", "")) < float("inf"):
        return Ending("preempted", requeue=True)
    return Ending("cancelled", requeue=False)


def kill_wait_s() -> int | None:
    """Seconds that this cluster gives a job between SIGTERM and SIGKILL; None when Slurm does not answer."""
    found = re.search(r"^KillWait\s*=\s*(\d+) sec", scontrol("show", "config") or "", re.MULTILINE)
    return int(found[1]) if found else None


def scontrol(*words: str) -> str | None:
    """What scontrol prints, or None when it fails, or is not there."""
    for _ in range(3):  # Slurm signals every process of the job, so a second SIGTERM may end the first scontrol
        try:
            asked = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if asked.returncode == 0:
            return asked.stdout
    return None


def _show_job(job_id: str) -> dict[str, str] | None:
    """The fields of `scontrol show job`, or None when there is no answer."""
    shown = scontrol("show", "job", "--oneliner", job_id)
    return None if shown is None else dict(word.split("=", 1) for word in shown.split() if "=" in word)


def _unix_time(text: str) -> float:
    """Seconds since 1970 of Slurm's local time; infinity for Unknown, None and N/A."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return float("inf")

"""Asking Slurm: its commands, and what they say of the job that this process is in."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping

DEFAULT_KILL_WAIT_S = 30  # seconds from SIGTERM to SIGKILL unless slurm.conf says otherwise (KillWait)
NEVER = float("inf")
Job = Mapping[str, str]  # the fields of `scontrol show job`


class SlurmError(RuntimeError):
    """Slurm refuses, or does not answer."""


def show_job(job_id: str) -> Job | None:
    """The fields of `scontrol show job`, or None when there is no answer."""
    with contextlib.suppress(SlurmError):
        shown = scontrol("show", "job", "--oneliner", job_id)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)
    return None


def kill_wait_s() -> int | None:
    """Seconds that this cluster gives a job between SIGTERM and SIGKILL; None when Slurm does not answer."""
    with contextlib.suppress(SlurmError):
        found = re.search(r"^KillWait\s*=\s*(\d+) sec", scontrol("show", "config"), re.MULTILINE)
        return int(found[1]) if found else None
    return None


def is_job_id(text: str) -> bool:
    """Whether this is an id of Slurm's, perhaps of one job of an array, rather than another launcher's name."""
    return re.fullmatch(r"\d+(_\d+)?", text) is not None


def scontrol(*words: str) -> str:
    """What scontrol prints. Raises SlurmError as `command` does."""
    return command("scontrol", *words)


def command(*words: str) -> str:
    """What one of Slurm's commands prints. Raises SlurmError when it fails, is not here, or has no answer in 10 s."""
    for _ in range(3):
        try:
            asked = subprocess.run(words, capture_output=True, text=True, timeout=10)
        except FileNotFoundError:
            raise SlurmError(f"no {words[0]} on this machine") from None
        except subprocess.TimeoutExpired:
            raise SlurmError("no answer within 10 s") from None
        if asked.returncode >= 0:  # Slurm signals every process of the job, so a second SIGTERM may end this one too
            break
    if asked.returncode:
        raise SlurmError(" ".join(asked.stderr.split()) or f"{words[0]} exited with {asked.returncode}")
    return asked.stdout


def unix_time(text: str) -> float:
    """Seconds since 1970 of Slurm's local time; NEVER for Unknown, None and N/A."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return NEVER

"""What is in Slurm's queue: one question for all runs, since every user asks the same controller."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.rundir import RunDir
from trainer.world.slurm import NEVER, unix_time

PATIENCE_S = 30
FIELDS = "%i|%T|%S|%r"


@dataclass(frozen=True)
class Job:
    """A job in the queue, or one of an array: its state in Slurm's words, e.g. PENDING, and why it waits."""

    state: str
    reason: str
    starts_at: float | None  # Unix seconds; expected, for one that waits


@dataclass(frozen=True)
class Queue:
    """Jobs by id (an array's as 12_3) at a moment, in Unix seconds; None when Slurm did not answer."""

    at: float
    jobs: dict[str, Job] | None

    @classmethod
    def ask(cls, runs: Iterable[RunDir]) -> Queue:
        """Ask squeue once, for the jobs of those who own these runs; without Slurm nothing is queued."""
        at = time.time()
        users = {os.getuid(), *(run.path.stat().st_uid for run in runs if run.path.exists())}
        if shutil.which("squeue") is None:
            return cls(at, {})
        command = [
            "squeue",
            "--noheader",
            "--array",
            f"--user={','.join(map(str, sorted(users)))}",
            f"--format={FIELDS}",
        ]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return cls(at, None)
        if asked.returncode:
            return cls(at, None)
        return cls(at, dict(map(_parse, asked.stdout.splitlines())))


def _parse(line: str) -> tuple[str, Job]:
    job_id, state, starts, reason = line.split("|", 3)
    starts_at = unix_time(starts)
    return job_id.strip(), Job(state, "" if reason == "None" else reason, None if starts_at == NEVER else starts_at)

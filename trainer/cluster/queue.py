"""The jobs in Slurm's queue: one squeue for all runs, since every user asks the same controller."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.rundir import RunDir
from trainer.world.slurm import NEVER, SlurmError, check_conf, unix_time

TIMEOUT_S = 30
FORMAT = "%i|%T|%S|%r"  # job id, state, start time, reason


@dataclass(frozen=True)
class Job:
    """A job in the queue, or one of an array: its state as Slurm names it, e.g. PENDING, and why it waits."""

    state: str
    reason: str
    starts_at: float | None  # Unix seconds; Slurm's estimate for a job that waits


@dataclass(frozen=True)
class Queue:
    """The jobs in the queue by id (an array's as 12_3); None when Slurm did not answer, and why. `at` is in Unix
    seconds."""

    at: float
    jobs: dict[str, Job] | None
    problem: str = "squeue does not answer"

    @classmethod
    def ask(cls, runs: Iterable[RunDir]) -> Queue:
        """Ask squeue once, for the jobs of this user and of the owners of these runs; without Slurm there are none."""
        at = time.time()
        users = {os.getuid(), *(run.path.stat().st_uid for run in runs if run.path.exists())}
        if shutil.which("squeue") is None:
            return cls(at, {})
        command = [
            "squeue",
            "--noheader",
            "--array",
            f"--user={','.join(map(str, sorted(users)))}",
            f"--format={FORMAT}",
        ]
        try:
            check_conf()
        except SlurmError as error:
            return cls(at, None, str(error))
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return cls(at, None)
        if asked.returncode:
            return cls(at, None)
        return cls(at, dict(map(_parse, asked.stdout.splitlines())))


def _parse(line: str) -> tuple[str, Job]:
    job_id, state, starts, reason = line.split("|", 3)
    starts_at = unix_time(starts)
    return job_id.strip(), Job(state, "" if reason == "None" else reason, None if starts_at == NEVER else starts_at)

"""The jobs in Slurm's queue: one squeue for all runs, since every user asks the same controller."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import filterfalse

from trainer.rundir import RunDir
from trainer.world.slurm import NEVER, TAG, SlurmError, check_conf, unix_time

TIMEOUT_S = 30
# Job id, state, start time, time of the submission or requeue, owner's uid, name, comment, reason. Names and comments
# may contain any printable character.
FIELDS = ("%i", "%T", "%S", "%V", "%U", "%j", "%k", "%r")
SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Job:
    """A job in the queue, or one of an array: its state as Slurm names it, e.g. PENDING, and why it waits.

    Times are in Unix seconds. See trainer/cluster/own_jobs.py for the fields that tell whose job it is.
    """

    state: str
    reason: str
    starts_at: float | None  # Slurm's estimate for a job that waits
    submitted_at: float = 0.0  # or requeued
    owner: int | None = None  # uid
    name: str = ""
    tag: str | None = None  # see trainer.world.slurm


@dataclass(frozen=True)
class Queue:
    """The jobs in the queue by id (an array's as 12_3); None when Slurm did not answer, and why. `at` is in Unix
    seconds.

    Slurm was not asked for the jobs of `unknown_owners`: uids that this machine does not know.
    """

    at: float
    jobs: dict[str, Job] | None
    problem: str = "squeue does not answer"
    unknown_owners: frozenset[int] = frozenset()

    @classmethod
    def ask(cls, runs: Iterable[RunDir]) -> Queue:
        """Ask squeue once, for the jobs of this user and of the owners of these runs; without Slurm there are none."""
        at = time.time()
        owners = {run.path.stat().st_uid for run in runs if run.path.exists()}
        unknown = frozenset(filterfalse(_has_account, owners))
        users = {os.getuid(), *owners} - unknown
        if shutil.which("squeue") is None:
            return cls(at, {}, unknown_owners=unknown)
        command = [
            "squeue",
            "--noheader",
            "--array",
            f"--user={','.join(map(str, sorted(users)))}",
            f"--format={SEPARATOR.join(FIELDS)}",
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
        jobs = (line.split(SEPARATOR) for line in asked.stdout.split("\n"))
        return cls(at, dict(_parse(*job) for job in jobs if len(job) == len(FIELDS)), unknown_owners=unknown)


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _parse(
    job_id: str, state: str, starts: str, submitted: str, owner: str, name: str, comment: str, reason: str
) -> tuple[str, Job]:
    starts_at, tags = unix_time(starts), TAG.findall(comment)
    return job_id.strip(), Job(
        state,
        "" if reason == "None" else reason,
        None if starts_at == NEVER else starts_at,
        unix_time(submitted),
        int(owner),
        name,
        tags[-1] if tags else None,
    )

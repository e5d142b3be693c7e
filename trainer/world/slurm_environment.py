"""What Slurm leaves in the environment of a job and of a step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from submitit.slurm.slurm import SlurmParseException

from trainer import compat
from trainer.config.errors import ConfigError

Env = Mapping[str, str]


def number(env: Env, variable: str) -> int:
    """What a launcher should have set to a number. Raises ConfigError."""
    value = env.get(variable, "")
    if not value.isdecimal():
        raise ConfigError(f"{variable}={value or '(not set)'}: the launcher should have set it to a number")
    return int(value)


def slurm_job(env: Env) -> tuple[str, int]:
    """Slurm's id of the job that a process is in, that of an array as 12_3, and how often it has been requeued."""
    job_id = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in env:
        job_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return job_id, number({"SLURM_RESTART_COUNT": "0", **env}, "SLURM_RESTART_COUNT")


def step_shares(env: Env) -> list[int]:
    """How many tasks each node of the step has, from 2(x3),1 for instance."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(share) for share, times in found for _ in range(int(times or 1))]


def step_hosts(env: Env, shares: Sequence[int]) -> tuple[str, ...] | None:
    """The node of each task, where srun has dealt them out block by block, or in turn."""
    names: list[str] = []
    with contextlib.suppress(SlurmParseException):
        names = compat.step_hostnames()
    how = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
    if how not in ("block", "cyclic") or len(names) != len(shares):
        return None
    tasks = [(turn, node) for node, share in enumerate(shares) for turn in range(share)]
    return tuple(names[node] for _, node in (sorted(tasks) if how == "cyclic" else tasks))

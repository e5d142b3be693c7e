"""Reading the environment variables that Slurm sets in a job and in a step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from submitit.slurm.slurm import SlurmParseException

from laststep import compat
from laststep.config.errors import ConfigError

Env = Mapping[str, str]


def read_int(env: Env, variable: str) -> int:
    """A number that the launcher should have set. Raises ConfigError when it is missing or not a number."""
    value = env.get(variable, "")
    if not value.isdecimal():
        raise ConfigError(f"{variable}={value or '(not set)'}: the launcher should have set it to a number")
    return int(value)


def slurm_job(env: Env) -> tuple[str, int]:
    """The Slurm id of this process's job, such as 12, or 12_3 in an array, and how often the job was requeued."""
    job_id = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in env:
        job_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return job_id, read_int({"SLURM_RESTART_COUNT": "0", **env}, "SLURM_RESTART_COUNT")


def job_start(env: Env) -> float | None:
    """When this start of the job began, in Unix seconds; None where Slurm does not say (before 23.02)."""
    began = env.get("SLURM_JOB_START_TIME", "")
    return float(began) if began.isdecimal() else None


def slurm_step(env: Env) -> int | None:
    """The number of the step that this process is a task of; None in the shell of a batch script, where Slurm 26.05
    sets SLURM_STEP_ID to -5."""
    return int(env["SLURM_STEP_ID"]) if env.get("SLURM_STEP_ID", "").isdecimal() else None


def step_tasks_per_node(env: Env) -> list[int]:
    """The number of tasks on each node of the step: [2, 2, 2, 1] for SLURM_STEP_TASKS_PER_NODE=2(x3),1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def step_task_hosts(env: Env, tasks_per_node: Sequence[int]) -> tuple[str, ...] | None:
    """The node of each task of the step. None when srun distributed them neither block by block nor in turn."""
    names: list[str] = []
    with contextlib.suppress(SlurmParseException):
        names = compat.step_hostnames()
    distribution = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
    if distribution not in ("block", "cyclic") or len(names) != len(tasks_per_node):
        return None
    tasks = [(turn, node) for node, count in enumerate(tasks_per_node) for turn in range(count)]
    return tuple(names[node] for _, node in (sorted(tasks) if distribution == "cyclic" else tasks))

"""What a run has recorded, and a World without a launcher, for tests of the code that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from laststep.ranks.world import World
from laststep.records.attempt_record import EndedAttempt
from laststep.records.metrics import MetricsFile


def add_metrics(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a metrics.jsonl as a run does."""
    metrics = MetricsFile(path, writes=True)
    metrics.append(records)
    metrics.sync()


def ended_attempt(**fields: Any) -> EndedAttempt:
    """The record of an attempt that finished ten steps on one node; `fields` are the ones that the test is about."""
    record = {
        "attempt": 0,
        "job_id": "7",
        "restart": 0,
        "step_id": None,
        "step_restarts": 0,
        "hosts": ["n1"],
        "world_size": 1,
        "start": 1.0,
        "job_start": None,
        "end": 2.0,
        "start_step": 0,
        "end_step": 10,
        "reason": "finished",
        "lost_steps": 0,
        "lost_s": 0.0,
        "step_s": 0.1,
        "save_s": None,
        "requeue": False,
        "error": None,
        "blamed": [],
    }
    assert fields.keys() <= record.keys()
    return cast("EndedAttempt", record | fields)


def a_world(rank: int = 0, size: int = 1, launcher: str = "submitit-local", **more: Any) -> World:
    """One rank of job 7, on one node."""
    node = {"local_rank": rank, "local_size": size, "node": 0, "nodes": 1, "hosts": ("here",) * size}
    job = {"job_id": "7", "restart": 0, "attempt": "7-0", "on_slurm": launcher in ("submitit-slurm", "srun")}
    return World(rank=rank, size=size, launcher=launcher, **{**node, **job, **more})

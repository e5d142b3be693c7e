"""A World for tests, without a launcher."""

from __future__ import annotations

from typing import Any

from laststep.ranks.world import World


def a_world(rank: int = 0, size: int = 1, launcher: str = "submitit-local", **more: Any) -> World:
    """One rank of job 7, on one node."""
    node = {"local_rank": rank, "local_size": size, "node": 0, "nodes": 1, "hosts": ("here",) * size}
    job = {"job_id": "7", "restart": 0, "attempt": "7-0", "on_slurm": launcher in ("submitit-slurm", "srun")}
    return World(rank=rank, size=size, launcher=launcher, **{**node, **job, **more})

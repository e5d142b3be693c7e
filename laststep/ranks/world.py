"""World: this process's place among the ranks of one attempt. ShardPlace: which part of the state it holds."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of one attempt, as its launcher describes it."""

    rank: int  # from 0, over all nodes
    size: int  # number of ranks
    local_rank: int  # from 0, on this node
    local_size: int  # number of ranks on this node
    node: int  # this node, from 0
    nodes: int  # number of nodes
    hosts: tuple[str, ...]  # the node of each rank; "" where the launcher does not say, until the ranks have met
    job_id: str  # Slurm's, or a name for this use of another launcher
    restart: int  # how often this job was started again: by a requeue, or by torchrun
    # Names the attempt in files. It differs between two jobs, two starts of one job, and two steps of one start.
    attempt: str
    launcher: str
    on_slurm: bool  # in a Slurm job: it can be requeued, and Slurm knows when it ends
    # Which start of the ranks within this allocation: Slurm's step, else counted by what starts them. None: not known.
    step_id: int | None = None
    # How often the ranks were started again within that step; None where no supervisor could do that.
    step_restarts: int | None = None
    supervised: bool = False  # what started the ranks outlives them, and may start them again, see `RESTARTS`
    launcher_restarts: bool = False  # the launcher itself starts all ranks again when one fails
    variables: tuple[str, ...] = ()  # the environment variables that rank, size and local_rank come from
    number: int | None = None  # the attempt's number in its run; None until rank 0 has broadcast it

    @property
    def start(self) -> str:
        """This start of the ranks, for messages: "job 12, restart 0, job step 1"."""
        return start_text(self.job_id, self.restart, self.step_id, self.step_restarts)

    def host_of(self, rank: int) -> str:
        """The node of a rank, for messages."""
        return self.hosts[rank] or "an unknown host"

    @property
    def by_submitit(self) -> bool:
        """Whether submitit started this process: then its files exist, and in a Slurm job it can requeue the job."""
        return self.launcher.startswith("submitit")

    @property
    def in_users_program(self) -> bool:
        """Whether a program of the user's called the Trainer, and lives on after it: nothing else was started."""
        return self.launcher in ("python", "submitit-debug")

    def __str__(self) -> str:
        job = f"slurm {self.start}" if self.on_slurm else self.job_id
        source = f"{self.launcher}, by {' and '.join(self.variables)}" if self.variables else self.launcher
        return f"rank {self.rank} of {self.size} on {self.host_of(self.rank)} ({job}; {source})"


def start_text(job_id: str, restart: int, step_id: int | None, step_restarts: int | None) -> str:
    """A start of the ranks, as `World.start` has it."""
    step = "" if step_id is None else f", job step {step_id}"
    again = f", restart in place {step_restarts}" if step_restarts else ""
    return f"job {job_id}, restart {restart}{step}{again}"


def hostname() -> str:
    """The name of this node: Slurm's name for it in a Slurm step, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class ShardPlace(NamedTuple):
    """A state is cut into `shards`; `replicas` ranks hold the same shard. Without sharding, every rank holds all of it:
    one shard, with as many replicas as there are ranks."""

    shard: int  # from 0
    shards: int
    replica: int  # from 0
    replicas: int

    @property
    def ranks(self) -> list[list[int]]:
        """All ranks: for each replica, those that hold its shards."""
        return [[self.rank_of(shard, replica) for shard in range(self.shards)] for replica in range(self.replicas)]

    def rank_of(self, shard: int, replica: int) -> int:
        """The rank that holds this copy of this shard."""
        return replica * self.shards + shard


Moment = tuple[int, int, bool, bool]  # of a run, see `Position.moment`; a later one is larger


class Gathered(NamedTuple):
    """What all ranks have told each other at the end of a step: with it, a rank that has its gradients can update."""

    step: int  # that the update completes, from 1
    values: tuple[str, ...]  # as float.hex writes them: exact, and equal to themselves even if they are NaN


def shard_place(sharding: str, world: World) -> ShardPlace:
    """A rank's place under `train.sharding`: full cuts the state over all ranks, hybrid over the ranks of a node."""
    if sharding == "full":
        return ShardPlace(world.rank, world.size, 0, 1)
    if sharding == "hybrid":
        return ShardPlace(world.rank % world.local_size, world.local_size, world.rank // world.local_size, world.nodes)
    return ShardPlace(0, 1, world.rank, world.size)


def shard_rows(rows: int, shard: int, shards: int) -> tuple[int, int]:
    """Where a shard of a tensor with this many rows begins and ends, as torch.chunk and DTensor's Shard(0) cut it: each
    shard has ceil(rows / shards) rows, those at the end fewer or none."""
    each = -(-rows // shards)
    return min(shard * each, rows), min((shard + 1) * each, rows)

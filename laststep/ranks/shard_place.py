"""Which part of the state a rank holds: its shard, and which copy of that shard."""

from __future__ import annotations

from typing import NamedTuple

from laststep.ranks.world import World


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

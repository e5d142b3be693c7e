"""The mesh of the ranks that FSDP2 shards over, with process groups that wait as long as the attempt's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from laststep.ranks.group import COLLECTIVE
from laststep.ranks.shard_place import ShardPlace


def make_mesh(place: ShardPlace, device: torch.device, adds_replicas: bool = True) -> DeviceMesh:
    """The mesh of all ranks. One replica: of the dimension "shard". Several: of "replicate" and "shard"; unless FSDP2
    `adds_replicas`, the mesh of this rank's replica alone.

    A collective.
    """
    names = ("replicate", "shard")
    if place.replicas == 1:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=names[1:])
    shards = _group(place.ranks)
    if not adds_replicas:
        return DeviceMesh.from_group(shards, device.type, mesh_dim_names=names[1:])
    groups = [replica_group(place), shards]
    return DeviceMesh.from_group(groups, device.type, mesh=place.ranks, mesh_dim_names=names)


def replica_group(place: ShardPlace) -> dist.ProcessGroup:
    """The ranks that hold this rank's shard. A collective."""
    return _group(list(zip(*place.ranks)))


def _group(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """That of these groups of ranks which this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration([list(part) for part in parts], timeout=COLLECTIVE)
    return group

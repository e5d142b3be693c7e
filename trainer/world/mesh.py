"""The mesh of the ranks that FSDP2 shards over, with process groups that wait as long as the attempt's own."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.world.shard_place import ShardPlace


def make_mesh(place: ShardPlace, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """The mesh of all ranks. One replica: of the dimension "shard". Several: of "replicate" and "shard".

    A collective.
    """
    if place.replicas == 1:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=("shard",))
    ranks = [[place.rank_of(shard, replica) for shard in range(place.shards)] for replica in range(place.replicas)]
    groups = []
    for parts in (list(zip(*ranks)), ranks):
        group, _ = dist.new_subgroups_by_enumeration([list(part) for part in parts], timeout=timeout)
        groups.append(group)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))

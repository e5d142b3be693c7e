"""Sharded states without the ranks that would hold them: DTensors by hand, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from laststep.checkpoint.pack import map_tensors
from laststep.ranks.world import ShardPlace, shard_rows


@contextmanager
def pretended_rank(place: ShardPlace) -> Iterator[DeviceMesh]:
    """The mesh of the rank at this place, for as long as this process pretends to be that rank."""
    dist.init_process_group(
        "fake",
        rank=place.rank_of(place.shard, place.replica),
        world_size=place.shards * place.replicas,
        store=FakeStore(),
    )
    try:
        if place.replicas == 1:
            yield init_device_mesh("cpu", (place.shards,), mesh_dim_names=("shard",))
        else:
            yield init_device_mesh("cpu", (place.replicas, place.shards), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


def sharded(full: Tensor, place: ShardPlace, mesh: DeviceMesh) -> Tensor:
    """What the rank at this place holds of a tensor that is cut by rows."""
    begin, end = shard_rows(len(full), place.shard, place.shards)
    placements: tuple[Placement, ...] = (Shard(0),) if place.replicas == 1 else (Replicate(), Shard(0))
    local = full.detach()[begin:end].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=stride)


def sharded_state(state: Any, place: ShardPlace, mesh: DeviceMesh) -> Any:
    """A state in which each tensor with rows is sharded, but those of one dimension of an odd length."""
    return map_tensors(state, lambda t: sharded(t, place, mesh) if is_cut(t) else t.detach().clone())


def is_cut(tensor: Tensor) -> bool:
    """Whether `sharded_state` cuts this tensor."""
    return tensor.dim() > 0 and tensor.is_contiguous() and not (tensor.dim() == 1 and len(tensor) % 2)


def places(shards: int, replicas: int = 1) -> list[ShardPlace]:
    """The places of all ranks, in rank order."""
    return [ShardPlace(shard, shards, replica, replicas) for replica in range(replicas) for shard in range(shards)]


def local(tensor: Tensor) -> Tensor:
    """What a rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

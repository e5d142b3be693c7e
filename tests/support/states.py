"""States for tests: sharded ones as DTensors made by hand, and frozen ones that one rank saves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from laststep.checkpoint.files import StateChanged, Stripe
from laststep.checkpoint.frozen import ChunkBuffers, FrozenState
from laststep.checkpoint.pack import map_tensors
from laststep.checkpoint.store import CheckpointStore, shard_name
from laststep.checkpoint.writer import WRITE_BYTES, CheckpointInfo, reason_of
from laststep.loops.engine import Engine
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


def frozen_state(
    store: CheckpointStore,
    info: CheckpointInfo,
    state: Any,
    world_size: int = 1,
    before_commit: Callable[[], None] = lambda: None,
) -> FrozenState:
    """A state that nothing changes any more."""
    buffer = torch.empty(WRITE_BYTES, dtype=torch.uint8)
    return FrozenState(store, info, state, world_size, before_commit, ChunkBuffers(buffer), is_whole=lambda: True)


def save_alone(
    store: CheckpointStore, info: CheckpointInfo, state: Any, world_size: int = 1, tag: str = "test"
) -> None:
    """Save a state in one file. Raises CheckpointError."""
    try:
        _save(frozen_state(store, info, state, world_size), tag)
    except OSError as error:
        store.discard(store.writing_folder(info.step, tag))
        raise store.write_error(info.step, reason_of(error)) from error


def save_frozen(engine: Engine) -> None:
    """Save the state that the loop has frozen; should the device change it meanwhile, the next one."""
    while True:
        try:
            with engine.frozen() as frozen:
                return _save(frozen, "rescue-0")
        except StateChanged:
            assert engine.freeze(timeout_s=0.0), "no state is whole any more"


def _save(frozen: FrozenState, tag: str) -> None:
    name = shard_name(0, 1)
    entry = frozen.write_part(tag, 0, Stripe(0, 1), name, after_chunk=lambda: None)
    frozen.commit(tag, {name: entry})


@contextlib.contextmanager
def torch_setting(config: Any, name: str, value: object) -> Iterator[None]:
    """Give a setting this value for a while, such as `torch_setting(torch._dynamo.config, "optimize_ddp", True)`.

    pytest's monkeypatch would delete it at the end, since torch does not keep it in the module's dictionary.
    """
    entry = config._config[name]
    default = entry.default
    with config.patch({name: value}):
        try:
            yield
        finally:
            entry.default = default  # laststep.compat changes it, for all threads

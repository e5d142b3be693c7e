"""What a custom training loop has sharded by itself: FSDP2's `fully_shard` has made its parameters DTensors.

A checkpoint holds such tensors if they are cut by rows over all ranks, in the order of the ranks: over one dimension of
a mesh (full), or over the last of two, of which the first has the replicas (hybrid).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from laststep.checkpoint.manager import CheckpointManager
from laststep.checkpoint.pack import map_tensors, tensors_of
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.checkpoint.shards import Like, is_distributed, shard_count
from laststep.config.errors import ConfigError
from laststep.loops.digests import leaves_of
from laststep.ranks.device import changed_numerics
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FSDP_1 = "FullyShardedDataParallel"


def place_of(state: Any, group: Group) -> ShardPlace:
    """Which shard of the registered state this rank holds, by the DTensors in it. Raises ConfigError for one that a
    checkpoint cannot hold, and where they are not cut alike."""
    place, first = ShardPlace(0, 1, group.world.rank, group.world.size), ""
    for name, leaf in leaves_of(state):
        if not is_distributed(leaf):
            continue
        its = _place_of(name, leaf, group)
        if not first:
            place, first = its, name
        elif its != place:
            raise ConfigError(
                f"{_given(name)} is cut into {its.shards} shards, and {first} into {place.shards}: give fully_shard "
                "the same mesh for everything that is registered"
            )
    return place


def _place_of(name: str, tensor: DTensor, group: Group) -> ShardPlace:
    given, placed, size = _given(name), tensor.placements, group.world.size
    try:
        shards = shard_count(tensor)
    except ValueError:
        shards = 0
    if not shards:
        raise ConfigError(
            f"{given} is a DTensor placed as {placed}; a checkpoint holds those that are cut by rows, Shard(0), over "
            "one dimension of a mesh, as fully_shard cuts them by default"
        )
    mesh = tensor.device_mesh.mesh
    cut = next(dim for dim, placement in enumerate(placed) if placement.is_shard())
    if mesh.movedim(cut, -1).flatten().tolist() != list(range(size)):
        kind = group.device.type
        raise ConfigError(
            f"{given} is sharded over a mesh of the ranks {mesh.tolist()}; give fully_shard one of all {size} ranks in "
            f'their order: init_device_mesh("{kind}", ({size},)), or a named one of (replicas, shards)'
        )
    if tensor.device.type != group.device.type:
        raise ConfigError(
            f"{given} is on {tensor.device.type}, and this run trains on {group.device.type}: call model.to_empty(...) "
            "before run.restore(...) if it has no memory yet, and leave out CPUOffloadPolicy"
        )
    rank = group.world.rank
    return ShardPlace(rank % shards, shards, rank // shards, size // shards)


def hold_shard(
    place: ShardPlace,
    saves: CheckpointManager,
    numerics: dict[str, str | int],
    checkpoint: SharedCheckpoint | None,
    say: Callable[[str], None],
) -> None:
    """From now on this rank saves that shard of the state. Notes in `numerics` how the state is sharded, and warns if
    the steps of the checkpoint were computed in another way."""
    saves.hold(place)
    if place.shards > 1:
        numerics["sharding"] = "full" if place.replicas == 1 else "hybrid"
    if checkpoint is not None and (changed := changed_numerics(checkpoint.manifest.numerics, numerics)):
        say(f"WARNING: {changed}")


def check_sharded(name: str, registered: Any) -> None:
    """Raise ConfigError for a registered object that is sharded in a way of its own."""
    if isinstance(registered, nn.Module) and any(type(part).__name__ == FSDP_1 for part in registered.modules()):
        raise ConfigError(f"run.restore({name}=...): {FSDP_1} is not supported; shard the model by fully_shard (FSDP2)")
    if not isinstance(registered, Optimizer) or not any(map(is_distributed, _parameters(registered))):
        return
    kind = type(registered)
    if (kind.state_dict, kind.load_state_dict) != (Optimizer.state_dict, Optimizer.load_state_dict):
        raise ConfigError(
            f"run.restore({name}=...): {kind.__name__} has a state_dict of its own, of which nothing says what is "
            "sharded; use one of torch.optim"
        )


def is_sharded(state: Any) -> bool:
    """Whether there is any DTensor in a state."""
    return any(map(is_distributed, tensors_of(state)))


def live_state(optimizer: Optimizer) -> dict[str, Any]:
    """An optimiser's state_dict, for a checkpoint to be loaded into. It makes most of its state in its first step;
    until then there is a `Like` for each sharded parameter."""
    state = optimizer.state_dict()
    likes = {n: Like(each) for n, each in enumerate(_parameters(optimizer)) if shard_count(each)}
    return {**state, "state": {**likes, **state["state"]}} if likes else state


def likes_of(state: Any) -> Any:
    """A `Like` for each sharded tensor in a state, and nothing for the others: what is loaded will be sharded alike."""
    return map_tensors(state, lambda tensor: Like(tensor) if shard_count(tensor) else None)  # type: ignore[arg-type,return-value]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", [])  # a wrapper that is refused later may have none
    return [parameter for group in groups for parameter in group["params"]]


def _given(name: str) -> str:
    registered, _, inner = name.partition(".")
    return f"run.restore({registered}=...): {inner}"

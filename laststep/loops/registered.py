"""The objects that a training function registered with run.restore(...): a checkpoint holds their state.

In reading order: the objects; what a rescue needs of them; those that differ between ranks; how they are sharded, if
the function has done that. FSDP2's `fully_shard` has made its parameters DTensors: a checkpoint holds those that are
cut by rows over all ranks, in the order of the ranks, over one dimension of a mesh (full), or over the last of two, of
which the first has the replicas (hybrid).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laststep import compat
from laststep.checkpoint.pack import Packed, map_tensors, serialized_structure, tensors_of
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.checkpoint.shards import Like, is_distributed, shard_count
from laststep.config.errors import ConfigError
from laststep.loops.digest import BaseWeights, digest, leaves_of
from laststep.loops.kinds import Unstorable, changes_in_place, decode, encode
from laststep.loops.snapshot import Buffers, Committed, HostSnapshot, OptimizerSnapshot, addresses
from laststep.optim.build import check_order, load_optimizer, loads_in_place, parameters_of, sort_parameters
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


State = dict[str, Any]
# Their state changes in the update of a step or after it, buffers excepted. All other objects may change earlier, so
# their state is copied at the end of each step; Accelerate's schedule counts micro-batches.
TORCH_TYPES = (nn.Module, Optimizer, torch.amp.GradScaler)


class Registered:
    """The registered objects, by name. Each has state_dict() and load_state_dict(), or can be changed in place, as a
    dict, an array or a generator."""

    def __init__(self, objects: Mapping[str, Any], group: Group, row: Tensor, opaque: bool = False) -> None:
        """`row` is one more tensor to broadcast with the buffers. With `opaque` a framework holds the rest of the
        state. Raises ConfigError for what cannot be registered."""
        objects = {name: _without_wrapper(each) for name, each in objects.items()}
        self.objects, self.opaque, self._group = objects, opaque, group
        self._bases = {name: each for name, each in objects.items() if isinstance(each, BaseWeights)}
        self._left_out = {id(base.model): base.left_out for base in self._bases.values()}
        self.own = {name: each for name, each in objects.items() if isinstance(each, Own)}
        self.exchange_own()
        modules = [registered for registered in objects.values() if isinstance(registered, nn.Module)]
        optimizers = [registered for registered in objects.values() if isinstance(registered, Optimizer)]
        self.optimizers = [optimizer for optimizer in optimizers if compat.takes_hooks(optimizer)]
        in_order = [parameter for module in modules for parameter in module.parameters()]
        self._sorted = any([sort_parameters(optimizer, in_order) for optimizer in self.optimizers])
        states = {name: _checked_state(name, registered) for name, registered in objects.items()}
        self.place = place_of(states, group)  # which shard of the state this rank holds
        for name, state in states.items():
            try:
                serialized_structure(Packed(state, self.place).structure)
            except Exception as error:  # pickle and torch.load raise many kinds
                raise _unstored(name, error) from error
        if not self.optimizers and not opaque:
            raise ConfigError(
                "run.restore(): register the optimizer too, as in restore(model=..., optimizer=...); of a wrapper with "
                "a state of its own, also the optimizer in it"
            )
        self.modules = modules
        self._scalers = {name: each for name, each in objects.items() if isinstance(each, torch.amp.GradScaler)}
        self._copied = [name for name, registered in objects.items() if not isinstance(registered, TORCH_TYPES)]
        self._copied_sharded = {name for name in self._copied if is_sharded(states[name])}
        self._copies: State = {}
        # Asked once: FSDP2 would free gathered weights, perhaps in the middle of a step.
        self._sharded: dict[str, dict[str, Any]] = {
            name: self._named(registered)
            for name, registered in objects.items()
            if isinstance(registered, nn.Module) and any(map(is_distributed, registered.parameters()))
        }
        self.parallel = [(module, ddp) for module in modules if (ddp := _ddp_of(module))]
        for _, ddp in self.parallel:
            ddp.broadcast_buffers = False  # `sync_buffers` does it, at the end of a step instead of its beginning
        self.buffers = Buffers(nn.ModuleList(map(unwrapped, modules)), group, row)
        self._present = torch.zeros((), device=group.device)
        self.snapshot()

    def unaveraged(self) -> list[str]:
        """The optimizers with a parameter whose gradient neither a registered DistributedDataParallel nor FSDP2
        averages."""
        averaged = {id(parameter) for _, ddp in self.parallel for parameter in ddp.parameters()}
        averaged |= {id(each) for named in self._sharded.values() for each in named.values() if is_distributed(each)}
        return [
            name
            for name, registered in self.objects.items()
            if isinstance(registered, Optimizer)
            and any(p.requires_grad and id(p) not in averaged for p in parameters_of(registered))
        ]

    def sync_buffers(self) -> None:
        """Receive rank 0's buffers, and its row of the values that the step has logged, for `buffers.commit`. A
        collective."""
        self.buffers.broadcast()
        self.meet()

    def meet(self) -> None:
        """Where the state is sharded, wait until every rank is here. No rank has all of the state, so the ranks move on
        together: one that begins its update knows that the others have all of their gradients. A collective."""
        if self.place.shards > 1:
            self._group.gather(self._present)

    def exchange_own(self) -> None:
        """Let every rank know the state that is each rank's own. A collective. Raises ConfigError."""
        for name, each in self.own.items():
            try:
                each.exchange()
            except Unstorable as error:
                raise ConfigError(f"run.own(...): {error}") from error
            except Exception as error:
                raise _unstored(name, error) from error

    def changed_own(self) -> str | None:
        """The name of an object whose state has changed since `exchange_own`, on this rank."""
        return next((name for name, each in self.own.items() if each.changed()), None)

    def snapshot(self) -> None:
        """The state is consistent now: copy the part of it that the next step may change before its update."""
        self.buffers.snapshot()
        self._copies = {name: self._copy(name) for name in self._copied}

    @property
    def has_sharded(self) -> bool:
        """Whether a module is sharded."""
        return bool(self._sharded)

    def check_sharding(self) -> None:
        """Raise ConfigError if what the first step has made could not be saved, such as an optimiser's state."""
        if not self._sharded:
            return
        place_of(self.state(), self._group)
        for name in self._copied:
            if name not in self._copied_sharded and is_sharded(_state_of(self.objects[name], name)):
                raise ConfigError(
                    f"run.restore({name}=...): holds DTensors that were not there when it was registered, so a "
                    "resumed run would not know how they are sharded; make them before run.restore(...)"
                )

    def parameters(self) -> list[Tensor]:
        """What the optimizers update."""
        return [parameter for each in self.optimizers for parameter in parameters_of(each)]

    def has_skipped(self) -> bool:
        """Whether a gradient scaler may have skipped the update of this step: that sets its tracker to 0."""
        states = [scaler.state_dict() for scaler in self._scalers.values()]
        return any(state and not state["_growth_tracker"] for state in states)

    def own_tensors(self) -> list[Tensor]:
        """The tensors in the registered objects that are not torch's own."""
        states = [_state_of(self.objects[name], name) for name in self._copied if name not in self.own]
        found = compat.tree_leaves([*states, *(each.live() for each in self.own.values())])
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def state(self, scalers: bool = True) -> State:
        """The state of the last finished step; after the first update of a step, a mixture. References. A
        gradient scaler, when asked for its state, waits for the device."""
        known: State = self._copies if scalers else {**self._copies, **dict.fromkeys(self._scalers)}
        return self._state(self.buffers.committed, known)

    def hold(self, on_host: Callable[[Tensor], bool]) -> HostSnapshot:
        """What the host holds of the state now, see `HostSnapshot`; the CPU itself changes the tensors that `on_host`
        names."""
        return _RegisteredSnapshot(self, on_host)

    def restore(self, checkpoint: SharedCheckpoint, advance: Callable[[], None], last: bool) -> None:
        """Load what `state` returned, see `SharedCheckpoint.load`. A collective. Raises ConfigError when it does not
        fit."""
        if bool(checkpoint.manifest.opaque) != self.opaque:
            here, there = ("checkpoint", "restore") if self.opaque else ("restore", "checkpoint")
            raise ConfigError(f"run.{here}(): this run's checkpoints were written by run.{there}(...); call that")
        # An older version has left nothing out of the model.
        if {*checkpoint.names, *self._bases} != self.objects.keys():
            raise ConfigError(
                f"run.restore(): this run's checkpoints hold {_list(checkpoint.names)}; register these, "
                f"not {_list(self.objects)}"
            )
        check_order(self._sorted, checkpoint.manifest.numerics)
        state = checkpoint.load(self._live(), advance, last)
        for name, base in self._bases.items():
            if name in state:
                base.load_state_dict(decode(state[name], path=name))
        for name, registered in self.objects.items():
            try:
                if isinstance(registered, BaseWeights):
                    continue
                if isinstance(registered, nn.Module):
                    self._load(unwrapped(registered), state[name])
                elif isinstance(registered, Optimizer):
                    saved = state[name]
                    groups = {"param_groups": decode(saved["param_groups"])} if "param_groups" in saved else {}
                    load_optimizer(registered, {**saved, **groups})
                elif isinstance(registered, Own):
                    registered.load(state[name])
                else:
                    _load(registered, state[name], name)
            except Exception as error:  # an object may raise anything when the state is not its own
                reason = " ".join(str(error).split())[:500]
                raise ConfigError(f"run.restore(): {name} does not take what the checkpoint holds: {reason}") from error
        for name, base in self._bases.items():
            if name not in state:
                base.take()
        self.snapshot()

    def _named(self, registered: nn.Module) -> dict[str, Any]:
        """The tensors of a module that a checkpoint holds."""
        module = unwrapped(registered)
        left_out = self._left_out.get(id(module), frozenset())
        return {name: each for name, each in module.state_dict(keep_vars=True).items() if name not in left_out}

    def _load(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Load what `_named` gave, or the whole state of a module."""
        if not (left_out := self._left_out.get(id(module))):
            module.load_state_dict(state)
            return
        found = module.load_state_dict(state, strict=False)
        if differ := [*found.unexpected_keys, *(name for name in found.missing_keys if name not in left_out)]:
            raise ConfigError(f"not in both: {', '.join(differ)}")

    def _state(self, buffers: Committed, copies: State) -> State:
        """The state with these buffers; an object that `copies` has is not asked."""

        def of(name: str, registered: Any) -> Any:
            if name in copies:
                return copies[name]
            if isinstance(registered, nn.Module):
                named = self._sharded.get(name) or self._named(registered)
                return self.buffers.in_state_dict(named, buffers, f"{self.modules.index(registered)}.")
            return _state_of(registered, name)

        return {name: of(name, registered) for name, registered in self.objects.items()}

    def _live(self) -> State:
        """What a checkpoint can be loaded into. Torch's own objects copy it there anyway, or take it over; any other
        may take these tensors for something else."""
        now = self.state()
        live: State = {}
        for name, registered in self.objects.items():
            if isinstance(registered, nn.Module):
                live[name] = now[name]
            elif isinstance(registered, Optimizer) and loads_in_place(registered):
                live[name] = live_state(registered)
            elif name in self._copied_sharded:  # what is loaded will be sharded alike
                live[name] = map_tensors(now[name], lambda t: Like(t) if shard_count(t) else None)  # type: ignore[arg-type,return-value]
        return live

    def _copy(self, name: str) -> Any:
        return _state_of(self.objects[name], name, copies=True)

    def _addresses(self) -> list[int]:
        """Where the parameters are in memory; of sharded ones, this rank's rows. FSDP2 hides those of a module while it
        has them gathered."""
        found = []
        for name, registered in self.objects.items():
            if name in self._sharded:
                parameters = [each for each in self._sharded[name].values() if isinstance(each, nn.Parameter)]
                found += addresses(map(compat.on_this_rank, parameters))
            elif isinstance(registered, nn.Module):
                found += addresses(registered.parameters())
        return found


class _RegisteredSnapshot:
    """The state of registered objects. Weights and scalers change on the device alone, each in its place."""

    def __init__(self, registered: Registered, on_host: Callable[[Tensor], bool]) -> None:
        self._registered = registered
        self._buffers, self._copies = registered.buffers.committed, dict(registered._copies)
        self._optimizers: dict[str, OptimizerSnapshot] = {}
        self._addresses = registered._addresses()
        for name, item in registered.objects.items():
            if isinstance(item, Optimizer):
                self._optimizers[name] = OptimizerSnapshot(item, on_host)

    @property
    def state(self) -> State:
        optimizers = {name: _encoded_groups(each.state_dict(), name) for name, each in self._optimizers.items()}
        return self._registered._state(self._buffers, {**self._copies, **optimizers})

    def unchanged(self) -> bool:
        return self._addresses == self._registered._addresses()


class Own:
    """Objects whose state is each rank's own, by name: what run.own(...) gives.

    Every rank keeps a copy of what each other rank has. They exchange it before the update of a step begins, while all
    of them still have the whole state of the step before. So any rank can save the state of all.
    """

    def __init__(self, objects: Mapping[str, Any], group: Group) -> None:
        """Raises ConfigError for an object that cannot be restored in place."""
        self.objects, self._group = dict(objects), group
        self.by_rank: State = {}  # as it was exchanged last; never changed in place
        self.bytes = 0  # of all ranks
        self._sent = ""  # a digest of this rank's part
        for name, each in objects.items():
            _check_changes("own", name, each)

    def exchange(self) -> None:
        """Let every rank know the state of all. A collective."""
        state, data = self.live(), io.BytesIO()
        torch.save(state, data)
        parts = self._group.gather_bytes(data.getvalue())
        self.bytes, self._sent = sum(map(len, parts)), digest(state)
        loaded = (torch.load(io.BytesIO(part), map_location="cpu", weights_only=True) for part in parts)
        self.by_rank = {f"rank {rank}": each for rank, each in enumerate(loaded)}

    def changed(self) -> bool:
        """Whether this rank's objects have changed since the exchange."""
        return digest(self.live()) != self._sent

    def live(self) -> State:
        """The state of this rank's objects now. References to their tensors."""
        return {name: _state_of(each, name) for name, each in self.objects.items()}

    def load(self, by_rank: State) -> None:
        """Restore this rank's objects from what `by_rank` was when it was saved. Raises ConfigError."""
        if (saved := len(by_rank)) != (size := self._group.world.size):
            raise ConfigError(f"it is the state of each of {saved} ranks, and now there are {size}; resume on {saved}")
        mine = by_rank[f"rank {self._group.world.rank}"]
        if mine.keys() != self.objects.keys():
            raise ConfigError(f"run.own(...) had {_list(mine)}, and now has {_list(self.objects)}")
        self.by_rank = by_rank
        for name, each in self.objects.items():
            _load(each, mine[name], name)
        self._sent = digest(self.live())


def _load(registered: Any, state: Any, name: str) -> None:
    """Give an object, which is none of torch's, this state."""
    if _has_state_dict(registered):
        registered.load_state_dict(decode(state, path=name))
    else:
        decode(state, registered, name)


def _ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that `module` is, or that torch.compile has wrapped."""
    while not isinstance(module, DistributedDataParallel):
        inner = compat.compiled_original(module)
        if inner is None:
            return None
        module = inner
    return module


def _without_wrapper(registered: Any) -> Any:
    """The optimizer or schedule in a wrapper that has no state of its own, such as Accelerate's and Lightning's."""
    inner = getattr(registered, "optimizer" if hasattr(registered, "zero_grad") else "scheduler", None)
    if not isinstance(inner, (Optimizer, LRScheduler)) or not hasattr(registered, "state_dict"):
        return registered
    has_own = registered.state_dict().keys() != inner.state_dict().keys()
    return registered if has_own else _without_wrapper(inner)


def unwrapped(module: Any) -> Any:
    """The object inside DistributedDataParallel and torch.compile: a checkpoint's names must not depend on these."""
    while isinstance(module, DistributedDataParallel) or compat.compiled_original(module) is not None:
        module = module.module if isinstance(module, DistributedDataParallel) else compat.compiled_original(module)
    return module


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "no objects"


def _has_state_dict(registered: Any) -> bool:
    has = hasattr(registered, "state_dict") and hasattr(registered, "load_state_dict")
    return has and not isinstance(registered, dict)


def _state_of(registered: Any, name: str, copies: bool = False) -> Any:
    """The object's state, as a checkpoint can hold it. Raises ConfigError."""
    if isinstance(registered, Own):
        return registered.by_rank
    if isinstance(registered, (nn.Module, Optimizer)):
        state = unwrapped(registered).state_dict()
        return _encoded_groups(state, name) if isinstance(registered, Optimizer) else state
    if _has_state_dict(registered):
        return encode(registered.state_dict(), name, copies)
    if isinstance(registered, dict):
        return encode(dict(registered), name, copies)
    return encode(registered, name, copies)


def _encoded_groups(state: dict[str, Any], name: str) -> dict[str, Any]:
    """An optimiser's state; its rates may be NumPy's numbers. Its tensors are left alone: there may be thousands."""
    groups = state.get("param_groups")
    return state if groups is None else {**state, "param_groups": encode(groups, f"{name}.param_groups")}


def _checked_state(name: str, registered: Any) -> Any:
    """The object's state. Raises ConfigError for an object that has none, or none that a checkpoint can hold."""
    if name == "position":
        raise ConfigError("run.restore(position=...): every checkpoint has a position already; choose another name")
    _check_changes("restore", name, registered)
    check_sharded(name, registered)
    try:
        return _state_of(registered, name)
    except Unstorable as error:
        raise ConfigError(f"run.restore({name}=...): {error}") from error
    except Exception as error:  # the object may be the user's
        raise _unstored(name, error) from error


def _check_changes(call: str, name: str, registered: Any) -> None:
    """Raise ConfigError for an object that cannot be given another state."""
    if not _has_state_dict(registered) and not changes_in_place(registered):
        raise ConfigError(
            f"run.{call}({name}=...): a {type(registered).__name__} has no state_dict() and load_state_dict(), "
            "and is no dict: keep it in a dict, and register that"
        )


def _unstored(name: str, error: Exception) -> ConfigError:
    reason = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[:300]
    return ConfigError(f"run.restore({name}=...): its state cannot be stored: {reason}")


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


def check_sharded(name: str, registered: Any) -> None:
    """Raise ConfigError for a registered object that is sharded in a way of its own."""
    if isinstance(registered, nn.Module) and any(type(part).__name__ == FSDP_1 for part in registered.modules()):
        raise ConfigError(f"run.restore({name}=...): {FSDP_1} is not supported; shard the model by fully_shard (FSDP2)")
    if not isinstance(registered, Optimizer) or not any(map(is_distributed, parameters_of(registered))):
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
    likes = {n: Like(each) for n, each in enumerate(parameters_of(optimizer)) if shard_count(each)}
    return {**state, "state": {**likes, **state["state"]}} if likes else state


def _given(name: str) -> str:
    registered, _, inner = name.partition(".")
    return f"run.restore({registered}=...): {inner}"

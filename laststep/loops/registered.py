"""The objects that a training function registered with run.restore(...): a checkpoint holds their state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laststep import compat
from laststep.checkpoint.pack import Packed, map_tensors, serialized_structure
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.checkpoint.shards import is_distributed, local_of
from laststep.compat import sharding
from laststep.config.errors import ConfigError
from laststep.loops.buffers import Buffers, Committed
from laststep.loops.custom_sharding import check_sharded, is_sharded, likes_of, live_state, place_of
from laststep.loops.held import HeldOptimizer, HeldState, addresses
from laststep.optim.build import check_order, load_optimizer, loads_in_place, sort_parameters
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace

State = dict[str, Any]
# Their state changes in the update of a step or after it, buffers excepted. All other objects may change earlier, so
# their state is copied at the end of each step.
TORCH_TYPES = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


class Registered:
    """The registered objects, by name. Each has state_dict() and load_state_dict(), or is a dict."""

    def __init__(self, objects: Mapping[str, Any], group: Group, row: Tensor, opaque: bool = False) -> None:
        """`row` is one more tensor to broadcast with the buffers. With `opaque` a framework holds the rest of the
        state. Raises ConfigError for what cannot be registered."""
        objects = {name: _without_wrapper(each) for name, each in objects.items()}
        self.objects, self.opaque, self._group = objects, opaque, group
        modules = [registered for registered in objects.values() if isinstance(registered, nn.Module)]
        optimizers = [registered for registered in objects.values() if isinstance(registered, Optimizer)]
        self.optimizers = [optimizer for optimizer in optimizers if compat.takes_hooks(optimizer)]
        in_order = [parameter for module in modules for parameter in module.parameters()]
        self._sorted = any([sort_parameters(optimizer, in_order) for optimizer in self.optimizers])
        states = {name: _checked_state(name, registered) for name, registered in objects.items()}
        self.place = place_of(states, group)  # which shard of the state this rank holds
        for name, state in states.items():
            _check_stored(name, state, self.place)
        if not self.optimizers and not opaque:
            raise ConfigError(
                "run.restore(): register the optimizer too, as in restore(model=..., optimizer=...); of a wrapper with "
                "a state of its own, also the optimizer in it"
            )
        self.modules = modules
        self._scalers = [registered for registered in objects.values() if isinstance(registered, torch.amp.GradScaler)]
        self._copied = [name for name, registered in objects.items() if not isinstance(registered, TORCH_TYPES)]
        self._copied_sharded = {name for name in self._copied if is_sharded(states[name])}
        self._copies: State = {}
        # Asked once: FSDP2 would free gathered weights, perhaps in the middle of a step.
        self._sharded: dict[str, dict[str, Any]] = {
            name: _unwrapped(registered).state_dict(keep_vars=True)
            for name, registered in objects.items()
            if isinstance(registered, nn.Module) and any(map(is_distributed, registered.parameters()))
        }
        self.parallel = [(module, ddp) for module in modules if (ddp := _ddp_of(module))]
        for _, ddp in self.parallel:
            ddp.broadcast_buffers = False  # `sync_buffers` does it, at the end of a step instead of its beginning
        self.buffers = Buffers(nn.ModuleList(map(_unwrapped, modules)), group, row)
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
            and any(p.requires_grad and id(p) not in averaged for g in registered.param_groups for p in g["params"])
        ]

    def sync_buffers(self) -> None:
        """Receive rank 0's buffers, and its row of the values that the step has logged. A collective."""
        self.buffers.broadcast()
        self.meet()

    def meet(self) -> None:
        """Where the state is sharded, wait until every rank is here. No rank has all of the state, so the ranks move on
        together: one that begins its update knows that the others have all of their gradients. A collective."""
        if self.place.shards > 1:
            self._group.gather(self._present)

    def apply_synced(self) -> None:
        """Put in place what `sync_buffers` received."""
        self.buffers.commit()

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
            if name not in self._copied_sharded and is_sharded(_state_of(self.objects[name])):
                raise ConfigError(
                    f"run.restore({name}=...): holds DTensors that were not there when it was registered, so a "
                    "resumed run would not know how they are sharded; make them before run.restore(...)"
                )

    def parameters(self) -> list[Tensor]:
        """What the optimizers update."""
        return [p for each in self.optimizers for group in each.param_groups for p in group["params"]]

    def has_skipped(self) -> bool:
        """Whether a gradient scaler may have skipped the update of this step: that sets its tracker to 0."""
        return any(state and not state["_growth_tracker"] for state in map(_state_of, self._scalers))

    def own_tensors(self) -> list[Tensor]:
        """The tensors in the registered objects that are not torch's own."""
        found = compat.tree_leaves([_state_of(self.objects[name]) for name in self._copied])
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def state(self) -> State:
        """The state of the last finished step; after the first update of a step, a mixture. References."""
        return self._state(self.buffers.committed, self._copies)

    def hold(self, on_host: Callable[[Tensor], bool]) -> HeldState:
        """What the host holds of the state now, see `HeldState`; the CPU itself changes the tensors that `on_host`
        names."""
        return _HeldRegistered(self, on_host)

    def restore(self, checkpoint: SharedCheckpoint, advance: Callable[[], None], last: bool) -> None:
        """Load what `state` returned, see `SharedCheckpoint.load`. A collective. Raises ConfigError when it does not
        fit."""
        if bool(checkpoint.manifest.opaque) != self.opaque:
            here, there = ("checkpoint", "restore") if self.opaque else ("restore", "checkpoint")
            raise ConfigError(f"run.{here}(): this run's checkpoints were written by run.{there}(...); call that")
        if set(checkpoint.names) != self.objects.keys():
            raise ConfigError(
                f"run.restore(): this run's checkpoints hold {_list(checkpoint.names)}; register these, "
                f"not {_list(self.objects)}"
            )
        check_order(self._sorted, checkpoint.manifest.numerics)
        state = checkpoint.load(self._live(), advance, last)
        for name, registered in self.objects.items():
            try:
                if isinstance(registered, dict):
                    registered.clear()
                    registered.update(state[name])
                elif isinstance(registered, Optimizer):
                    load_optimizer(registered, state[name])
                else:
                    _unwrapped(registered).load_state_dict(state[name])
            except Exception as error:  # an object may raise anything when the state is not its own
                reason = " ".join(str(error).split())[:500]
                raise ConfigError(f"run.restore(): {name} does not take what the checkpoint holds: {reason}") from error
        self.snapshot()

    def _state(self, buffers: Committed, copies: State) -> State:
        """The state with these buffers; an object that `copies` has is not asked."""

        def of(name: str, registered: Any) -> Any:
            if name in copies:
                return copies[name]
            if isinstance(registered, nn.Module):
                named = self._sharded.get(name) or _unwrapped(registered).state_dict(keep_vars=True)
                return self.buffers.in_state_dict(named, buffers, f"{self.modules.index(registered)}.")
            return _state_of(registered)

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
            elif name in self._copied_sharded:
                live[name] = likes_of(now[name])
        return live

    def _copy(self, name: str) -> Any:
        state = _state_of(self.objects[name])
        if name in self._copied_sharded:  # a deep copy of a DTensor has a mesh of its own
            return map_tensors(state, lambda tensor: tensor.detach().clone())
        return copy.deepcopy(state)

    def _addresses(self) -> list[int]:
        """Where the parameters are in memory; of sharded ones, this rank's rows. FSDP2 hides those of a module while it
        has them gathered."""
        found = []
        for name, registered in self.objects.items():
            if name in self._sharded:
                parameters = [each for each in self._sharded[name].values() if isinstance(each, nn.Parameter)]
                found += addresses(map(sharding.on_this_rank, parameters))
            elif isinstance(registered, nn.Module):
                found += addresses(registered.parameters())
        return found


class _HeldRegistered:
    """The state of registered objects. Weights and scalers change on the device alone, each in its place."""

    def __init__(self, registered: Registered, on_host: Callable[[Tensor], bool]) -> None:
        self._registered = registered
        self._buffers, self._copies = registered.buffers.committed, dict(registered._copies)
        self._optimizers: dict[str, HeldOptimizer] = {}
        self._addresses = registered._addresses()
        for name, item in registered.objects.items():
            if isinstance(item, Optimizer):
                self._optimizers[name] = HeldOptimizer(item, on_host)
            elif isinstance(item, LRScheduler):
                self._copies[name] = copy.deepcopy(item.state_dict())

    @property
    def state(self) -> State:
        optimizers = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        return self._registered._state(self._buffers, {**self._copies, **optimizers})

    def unchanged(self) -> bool:
        return self._addresses == self._registered._addresses()


class FingerprintedState:
    """A state held by references to its tensors, with a fingerprint that shows whether they have changed since: on this
    rank."""

    def __init__(self, state: State) -> None:
        self._tensors: list[Tensor] = []
        self.state = map_tensors(state, self._reference)
        self._versions = self._fingerprint()

    def unchanged(self) -> bool:
        """Whether every tensor still has the values that it had."""
        then, now = self._versions, self._fingerprint()
        return then[0] == now[0] and all(bool((a == b).all()) for a, b in zip(then[1], now[1]))

    def _reference(self, tensor: Tensor) -> Tensor:
        reference = tensor.detach()
        self._tensors.append(local_of(reference) if is_distributed(reference) else reference)
        return reference

    def _fingerprint(self) -> tuple[list[int], list[Tensor]]:
        """Torch's version counters, and hashes of the values: writes through `.data` count no version. The hashes stay
        on the device of their tensors, of which there may be several: Adam's `step` is on the CPU."""
        hashes: dict[torch.device, list[Tensor]] = {}
        for t in self._tensors:
            if t.is_floating_point() and t.itemsize > 1 and t.numel():
                hashes.setdefault(t.device, []).append(torch.hash_tensor(t).view(torch.int64))
        return [compat.version_of(t) for t in self._tensors], [torch.stack(same) for same in hashes.values()]


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


def _unwrapped(module: Any) -> Any:
    """The object inside DistributedDataParallel and torch.compile: a checkpoint's names must not depend on these."""
    while isinstance(module, DistributedDataParallel) or compat.compiled_original(module) is not None:
        module = module.module if isinstance(module, DistributedDataParallel) else compat.compiled_original(module)
    return module


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "no objects"


def _state_of(registered: Any) -> Any:
    return registered if isinstance(registered, dict) else _unwrapped(registered).state_dict()


def _checked_state(name: str, registered: Any) -> Any:
    """The object's state. Raises ConfigError for an object that has none, or none that a checkpoint can hold."""
    if name == "position":
        raise ConfigError("run.restore(position=...): every checkpoint has a position already; choose another name")
    if not isinstance(registered, dict) and not (
        hasattr(registered, "state_dict") and hasattr(registered, "load_state_dict")
    ):
        raise ConfigError(
            f"run.restore({name}=...): a {type(registered).__name__} has no state_dict() and load_state_dict(), "
            "and is no dict"
        )
    check_sharded(name, registered)
    try:
        return _state_of(registered)
    except Exception as error:  # the object may be the user's
        raise _unstored(name, error) from error


def _check_stored(name: str, state: Any, place: ShardPlace) -> None:
    """Raise ConfigError for a state that a checkpoint cannot hold."""
    try:
        serialized_structure(Packed(state, place).structure)
    except Exception as error:  # pickle and torch.load raise many kinds
        raise _unstored(name, error) from error


def _unstored(name: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:300]
    return ConfigError(f"run.restore({name}=...): its state cannot be stored: {reason}")

"""What a function has registered: the objects whose state a checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer import compat
from trainer.checkpoint.pack import Packed, map_tensors, serialized_structure
from trainer.config.errors import ConfigError
from trainer.loops.buffers import Buffers
from trainer.loops.rehearsal import rehearse
from trainer.world.group import Group

State = dict[str, Any]
# Their state changes with the update of a step or after it. Of anything else a copy is kept at the end of each step.
OF_TORCH = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


class Registered:
    """The registered objects, by name. Each has state_dict() and load_state_dict(), or is a dict."""

    def __init__(self, objects: Mapping[str, Any], group: Group, row: Tensor) -> None:
        self._objects = objects
        for name, thing in objects.items():
            _check(name, thing)
        self.optimizers = [thing for thing in objects.values() if isinstance(thing, Optimizer)]
        if not self.optimizers:
            raise ConfigError("run.restore(): register the optimizer too, as in restore(model=..., optimizer=...)")
        modules = [thing for thing in objects.values() if isinstance(thing, nn.Module)]
        self._others = [name for name, thing in objects.items() if not isinstance(thing, OF_TORCH)]
        self._copies: State = {}
        parallel = [(module, ddp) for module in modules if (ddp := _ddp_of(module))]
        for module, ddp in parallel:
            ddp.broadcast_buffers = False  # `share` does it, at the end of a step instead of its begin
            rehearse(module, ddp, group.device)
        self.parallel = bool(parallel)  # gradients are averaged by DistributedDataParallel
        self._buffers = Buffers(nn.ModuleList(map(_bare, modules)), group, row)
        self.keep()

    def share(self) -> None:
        """Give every rank the buffers of rank 0, and its row of what the step has logged. A collective."""
        self._buffers.share()

    def keep_shared(self) -> None:
        """Put in what `share` brought."""
        self._buffers.keep()

    def keep(self) -> None:
        """The state is whole now: keep what the next step changes before its update."""
        self._buffers.restart()
        self._copies = {name: copy.deepcopy(_state_of(self._objects[name])) for name in self._others}

    def settle(self) -> None:
        """`share` and keep, between two steps: after a forward pass that came later than the update, buffers differ."""
        self.share()
        self.keep_shared()
        self.keep()

    def state(self) -> State:
        """The state of the last whole step, but for what changes with an update. References."""
        return {name: self._state(name, thing) for name, thing in self._objects.items()}

    def put_in(self, state: State) -> None:
        """Put in what `state` gave. Raises ConfigError when it does not fit."""
        if state.keys() != self._objects.keys():
            raise ConfigError(
                f"run.restore(): this run's checkpoints hold {', '.join(state)}; register these, "
                f"not {', '.join(self._objects)}"
            )
        for name, thing in self._objects.items():
            try:
                if isinstance(thing, dict):
                    thing.clear()
                    thing.update(state[name])
                else:
                    _bare(thing).load_state_dict(state[name])
            except Exception as error:  # whatever an object makes of a state that is not its own
                said = " ".join(str(error).split())[:500]
                raise ConfigError(f"run.restore(): {name} does not take what the checkpoint holds: {said}") from error
        self.keep()

    def _state(self, name: str, thing: Any) -> Any:
        if name in self._copies:
            return self._copies[name]
        if isinstance(thing, nn.Module):
            return self._buffers.kept_in(_bare(thing).state_dict(keep_vars=True))
        return _state_of(thing)


class Kept:
    """The state as it is now, held by references to its tensors, for as long as nobody changes those."""

    def __init__(self, state: State) -> None:
        self._tensors: list[Tensor] = []
        self.state = map_tensors(state, self._reference)
        self._versions = self._fingerprint()

    def unchanged(self) -> bool:
        """Whether every tensor still has the values that it had."""
        then, now = self._versions, self._fingerprint()
        return then[0] == now[0] and torch.equal(then[1], now[1])

    def _reference(self, tensor: Tensor) -> Tensor:
        self._tensors.append(tensor.detach())
        return self._tensors[-1]

    def _fingerprint(self) -> tuple[list[int], Tensor]:
        """The versions that torch counts, and for changes past it (`.data`) hashes of the values, on the device."""
        hashed = [t for t in self._tensors if t.is_floating_point() and t.itemsize > 1 and t.numel()]
        hashes = [torch.hash_tensor(tensor).view(torch.int64) for tensor in hashed]
        return [compat.version_of(t) for t in self._tensors], torch.stack(hashes)


def _ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a module is, or that it wraps as torch.compile does."""
    while not isinstance(module, DistributedDataParallel):
        inner = compat.compiled_original(module)
        if inner is None:
            return None
        module = inner
    return module


def _bare(thing: Any) -> Any:
    """What DistributedDataParallel and torch.compile wrap: its tensors' names are the same without them."""
    while isinstance(thing, DistributedDataParallel) or compat.compiled_original(thing) is not None:
        thing = thing.module if isinstance(thing, DistributedDataParallel) else compat.compiled_original(thing)
    return thing


def _state_of(thing: Any) -> Any:
    return thing if isinstance(thing, dict) else _bare(thing).state_dict()


def _check(name: str, thing: Any) -> None:
    """Raise ConfigError for what a checkpoint cannot hold."""
    if name == "position":
        raise ConfigError("run.restore(position=...): a checkpoint has one of its own; choose another name")
    if not isinstance(thing, dict) and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ConfigError(
            f"run.restore({name}=...): a {type(thing).__name__} has no state_dict() and load_state_dict(), "
            "and is no dict"
        )
    try:
        serialized_structure(Packed(_state_of(thing)).structure)
    except Exception as error:  # whatever pickle or torch.load has to say
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"run.restore({name}=...): its state cannot be stored: {said}") from error

"""Gives a sharded model that was built on the meta device its memory and its initial values, each rank its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from laststep.checkpoint.shards import local_of
from laststep.loops.deferred_init import CannotDefer, Ref, Tape
from laststep.ranks.world import ShardPlace, shard_rows
from laststep.say import say

Slot = tuple[nn.Module, str]  # a module, and the name of its parameter or buffer


class InitialValues:
    """The initial values of a model that has no memory yet."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._slots: dict[Ref | Tensor, list[Slot]] = defaultdict(list)

    def note(self, models: Sequence[nn.Module]) -> None:
        """`models` are the one on the tape and copies of it. Call this before any of them is changed."""
        for alike in zip(*(model.modules() for model in models)):
            for name, tensor in _own(alike[0]):
                self._slots[Ref.of(tensor) if tensor.is_meta else tensor] += [(module, name) for module in alike]

    def fill(self, models: Sequence[nn.Module], place: ShardPlace, device: torch.device) -> None:
        """Give the models, which have been sharded, memory on the device, and their values."""
        made: dict[int, Tensor] = {}
        for value, slots in self._slots.items():
            for module, name in slots:
                before = getattr(module, name)
                if id(before) not in made:  # a tied parameter has several slots
                    made[id(before)] = _with_memory(before, device)
                setattr(module, name, made[id(before)])
            if isinstance(value, Tensor):
                for slot in slots:
                    _sink(slot, place)(value)
        for model in models:
            model.load_state_dict({}, strict=False)  # has FSDP2 look where its shards are now
        refs = {ref: slots for ref, slots in self._slots.items() if isinstance(ref, Ref)}
        self._tape.replay({ref: [_sink(slot, place) for slot in slots] for ref, slots in refs.items()})


def build(
    make: Callable[[], nn.Module], reseed: Callable[[], None], says: bool
) -> tuple[nn.Module, InitialValues | None]:
    """The model on the meta device, with its initial values; or with memory, where that cannot be, which is said."""
    try:
        tape = Tape()
        return tape.record(make), InitialValues(tape)
    except CannotDefer as why:
        if says:
            say(f"WARNING: model() cannot be built shard by shard ({why}); each rank first builds it in host memory")
    reseed()
    return make(), None


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _sink(slot: Slot, place: ShardPlace) -> Callable[[Tensor], None]:
    """What copies a rank's rows of a tensor to where they belong."""
    module, name = slot

    @torch.no_grad()
    def take(value: Tensor) -> None:
        target = getattr(module, name)
        rows = local_of(target)
        if rows.shape != value.shape:
            begin, end = shard_rows(len(value), place.shard, place.shards)
            value = value[begin:end]
        rows.copy_(value)

    return take

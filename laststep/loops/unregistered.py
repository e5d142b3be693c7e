"""Finds what a custom loop uses and has forgotten to register: a resumed run would begin it anew, without a word.

It looks at the objects of torch that exist as the first step begins, which bear a state from step to step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from laststep import compat
from laststep.loops.registered import Registered

NAMES = {Optimizer: "optimizer", LRScheduler: "scheduler", GradScaler: "scaler", AveragedModel: "average"}
MOST_ITEMS, MOST_DEPTH = 64, 4  # within a registered object


class Unregistered:
    """The objects of these types that no registered object has."""

    def __init__(self, registered: Registered, objects: Iterable[Any]) -> None:
        self._updated = {id(parameter) for parameter in registered.parameters()}
        has = {id(each) for each in _within(registered.objects, set(), 0)}
        kinds = tuple(NAMES)
        self._found = [weakref.ref(each) for each in objects if issubclass(type(each), kinds) and id(each) not in has]

    def problem(self) -> str | None:
        """After the first step: what a resumed run would lack; None if it lacks nothing."""
        if not any(map(self._is_used, self._alive())):
            return None
        gc.collect()  # one that nobody uses any more may still exist
        for each in filter(self._is_used, self._alive()):
            name = next(name for kind, name in NAMES.items() if isinstance(each, kind))
            return (
                f"a {type(each).__name__} is not registered, so a resumed run would begin it anew; write "
                f"run.restore(model=model, optimizer=optimizer, ..., {name}=...)"
            )
        return None

    def _alive(self) -> Iterator[Any]:
        return (each for found in self._found if (each := found()) is not None)

    def _is_used(self, each: Any) -> bool:
        """Whether its state matters: an optimiser may have none, or be part of a registered one."""
        if isinstance(each, Optimizer):
            if not compat.takes_hooks(each):  # a wrapper; what is in it was found as well
                return False
            updates = {id(parameter) for group in each.param_groups for parameter in group["params"]}
            has_state = any(value is not None for state in each.state.values() for value in state.values())
            return has_state and not updates <= self._updated
        return not isinstance(each, GradScaler) or each.is_enabled()


def _within(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """The value and what it is made of: a schedule of schedules, the parts of a user's own object."""
    if id(value) in seen or depth > MOST_DEPTH or isinstance(value, (Tensor, type)):
        return
    seen.add(id(value))
    yield value
    if isinstance(value, nn.Module):
        yield from value.modules()  # its other attributes are in no checkpoint
        return
    parts = value
    if isinstance(value, Mapping):
        parts = value.values()
    elif not isinstance(value, (list, tuple)):
        parts = list(getattr(value, "__dict__", {}).values())
        if isinstance(value, LRScheduler):
            parts = [part for part in parts if not isinstance(part, Optimizer)]
    if len(parts) <= MOST_ITEMS:
        for part in parts:
            yield from _within(part, seen, depth + 1)

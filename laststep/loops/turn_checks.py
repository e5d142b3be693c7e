"""Checks that a turn of a custom training loop, one iteration of run.steps(...), is one step: it makes the update of
what it has drawn itself.

A turn that leaves gradients to the next one is noticed where two turns in a row make no update, or in the first turns.
A batch that is drawn in one turn and trained in the next is not drawn again by a run that resumes between the two. The
same holds for an iterator that is advanced from turn to turn: each attempt would start it from its first batch. Both
leave a trace in the first two turns: an object that is made or advanced in the first, and still alive at its end. So no
step after these is slowed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laststep import compat
from laststep.checkpoint.shards import local_of
from laststep.config.errors import ConfigError
from laststep.data.loader import is_ours
from laststep.loops.registered import Registered
from laststep.loops.unregistered import Unregistered

MOST_OBJECTS = 2_000_000  # that may be looked at: a tenth of a second


class TurnChecks:
    """Watches the turns of one attempt."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._turn = 0
        self._gradients = _Gradients([])  # at the beginning of step `_gradients_of` (from 0)
        self._gradients_of = -1
        self._before: set[int] = set()  # the tensors at the beginning of the first turn, by id
        self._given: dict[int, int] = {}  # the batches that each iteration over a DataLoader had given by then, by id
        self._unregistered: Unregistered | None = None
        self._used: list[weakref.ref[Tensor]] = []  # the inputs of the first turn
        self._earlier: dict[int, weakref.ref[Tensor]] = {}  # the tensors that the first turn has made and left, by id

        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Not a method: a copy of the module has this hook too, and would copy all that a method belongs to."""
            if self._turn < 3 and module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._check_inputs(compat.tree_leaves((args, kwargs)))

        self._hooks = [
            module.register_forward_pre_hook(before_forward, with_kwargs=True) for module in registered.modules
        ]

    def begin(self, step: int) -> None:
        """The turn of `step` (from 0) begins."""
        if self._turn > 2:
            return
        self._turn += 1
        self._keep_gradients(step)
        if self._turn == 1:
            self._before = {id(tensor) for tensor in _tensors()}
            self._given = dict(_iterations())
            if not step and not self._registered.opaque:
                self._unregistered = Unregistered(self._registered, _objects())
        elif self._turn == 3:
            for hook in self._hooks:
                hook.remove()
            self._earlier.clear()

    def end(self, step: int) -> None:
        """The body of the turn of `step` (from 0) is done. Raises ConfigError."""
        if self._turn != 1:
            return
        self._registered.check_sharding()
        if self._unregistered and (problem := self._unregistered.problem()):
            raise ConfigError(problem)
        if any(given > self._given.get(iteration, 0) for iteration, given in _iterations()):
            raise ConfigError(
                f"step {step + 1} drew a batch from an iteration over a DataLoader that goes beyond the step; each "
                "attempt would begin it again. For a second loader write `more = run.batches(run.loader(dataset, "
                "batch_size))` before the loop and `next(more)` in it"
            )
        known = self._before | {id(tensor) for tensor in self._registered.own_tensors()}
        known |= {id(tensor) for used in self._used if (tensor := used()) is not None}
        self._earlier = {id(tensor): weakref.ref(tensor) for tensor in _tensors() if id(tensor) not in known}
        self._before.clear()

    def no_update(self, step: int) -> None:
        """The turn of `step` (from 0) has made no update. Raises ConfigError if it leaves gradients to the next one."""
        changed = self._gradients_of == step and not self._gradients.unchanged()
        if changed and not self._registered.has_skipped() and self._gradients.any():
            raise ConfigError(
                f"step {step + 1} left gradients without an optimizer.step(): one iteration of run.steps(...) is one "
                "update. Accumulate micro-batches within an iteration; end an iteration that skips its update with "
                "optimizer.zero_grad(); register the GradScaler if there is one"
            )
        self._keep_gradients(step + 1)

    def _keep_gradients(self, step: int) -> None:
        self._gradients, self._gradients_of = _Gradients(self._registered.parameters()), step

    def _check_inputs(self, arguments: list[Any]) -> None:
        """A registered module is called with these. Raises ConfigError."""
        for argument in arguments:
            if not isinstance(argument, Tensor):
                continue
            for tensor in (argument, compat.viewed(argument)):
                if tensor is None:
                    continue
                if self._turn == 1:
                    self._used.append(weakref.ref(tensor))
                elif (earlier := self._earlier.get(id(tensor))) is not None and earlier() is tensor:
                    raise ConfigError(
                        f"an input of shape {tuple(argument.shape)} was made in the iteration of run.steps(...) before "
                        "this one; a run that resumes between the two would not have it. Draw each batch in the "
                        "iteration that trains it (run.loader's workers load ahead), and register what an iteration "
                        "leaves to the next with run.restore(...)"
                    )


class _Gradients:
    """The gradients of parameters at some moment: which they were, and how often torch had changed them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._then = [None if p.grad is None else weakref.ref(p.grad) for p in parameters]
        self._versions = self._count()

    def unchanged(self) -> bool:
        """Whether there has been no backward pass since."""
        same = (p.grad is (then and then()) for p, then in zip(self._parameters, self._then))
        return all(same) and self._versions == self._count()

    def any(self) -> bool:
        """Whether any gradient is not 0 now; of sharded ones, on this rank."""
        return any(p.grad is not None and bool(local_of(p.grad).norm()) for p in self._parameters)

    def _count(self) -> list[int]:
        return [0 if p.grad is None else compat.version_of(p.grad) for p in self._parameters]


def _objects() -> list[Any]:
    """The objects that the garbage collector knows: those made since the loop began, see `Loop.run`."""
    objects = gc.get_objects()
    return objects if len(objects) <= MOST_OBJECTS else []


def _tensors() -> Iterator[Tensor]:
    return (found for found in _objects() if issubclass(type(found), Tensor))


def _iterations() -> Iterator[tuple[int, int]]:
    """The ids of unfinished iterations over the user's own DataLoaders, each with the batches that it has given."""
    for iteration, dataset, given in compat.open_iterations(_objects()):
        if not is_ours(dataset):
            yield id(iteration), given

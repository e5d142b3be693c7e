"""The rules of a custom training loop, docs/custom-loops.md: what is checked while it trains, and what to write instead
where it is used in a way that could not be resumed.

First what is said of single calls. `StepChecks` watches the first steps, with `Unregistered`; `Modes` compares an
attempt with the one before. The rules of `run.shares(...)` are in shares.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from laststep import compat
from laststep.checkpoint.manager import Position
from laststep.checkpoint.shards import local_of
from laststep.config.errors import ConfigError
from laststep.data.loader import StepLoader, StepNumbers, is_ours
from laststep.data.streams import StepStream
from laststep.loops.registered import Registered
from laststep.optim.build import parameters_of
from laststep.say import command

NEEDED = (
    "write run.restore(model=model, optimizer=optimizer, ...) before the loop, and `for batch in run.steps(loader):` "
    "as the loop, with a loader of run.loader(dataset, batch_size)"
)
TWICE = (
    "run.steps(...) twice in an epoch: put `for epoch in run.epochs(n):` around one loop over run.steps(...), and draw "
    "from a second loader with `more = run.batches(loader)` before that loop and `next(more)` in it"
)
UPDATE_TOO_EARLY = f"an optimizer's step() before run.restore(...); {NEEDED}"
UPDATE_BEFORE_STEPS = (
    "WARNING: an optimizer's step() before the loop over run.steps(...): such updates are repeated in each attempt, "
    "and undone when it resumes"
)


UPDATE_WITHIN = (
    "an optimizer.step() in micro-batch {} of {}: with run.steps(..., accumulate={}) a step makes one update, in its "
    "last micro-batch; write `if run.sync_gradients:` around it"
)


def of_steps(loader: object, registered: bool, accumulate: int, shares: int | None) -> str | None:
    """Of run.steps(...) with this loader, in a run with train.shares=`shares`; None if it is right. `registered`: after
    run.restore(...)."""
    if not registered:
        return (
            "call run.restore(model=model, optimizer=optimizer, ...) before run.steps(...): it registers what a "
            "checkpoint holds"
        )
    if not isinstance(loader, (StepLoader, StepStream, StepNumbers)):
        return (
            f"run.steps(...) takes what run.loader(...) gave, not a {type(loader).__name__}: write `loader = "
            "run.loader(dataset, batch_size)`, or run.stream(...) for data that can only be iterated, or "
            "run.steps(count=N) for a loop that draws its own batches"
        )
    if type(accumulate) is not int or accumulate < 1:
        return f"run.steps(accumulate={accumulate!r}): must be a number of micro-batches per step, 1 or more"
    if shares is not None and accumulate > 1:
        return (
            f"run.steps(accumulate={accumulate}) with train.shares={shares}: a rank computes its shares one after "
            f"another already; leave accumulate out, and make the loader's batch_size {accumulate} times as large"
        )
    if (needed := compat.accelerate_micro_batches()) not in (1, accumulate):
        return (
            f"Accelerator(gradient_accumulation_steps={needed}) makes one update of {needed} micro-batches: write "
            f"run.steps(..., accumulate={needed})"
        )
    return None


def of_batches(loader: object, per_step: int, shares: int | None) -> str | None:
    """Of run.batches(...) with this loader, in a run with train.shares=`shares`; None if it is right."""
    if not isinstance(loader, StepLoader):
        return f"run.batches(...) takes what run.loader(...) gave, not a {type(loader).__name__}"
    if shares is not None and per_step > 1:
        return f"run.batches(..., per_step={per_step}): with train.shares each share has one batch; leave this out"
    return None


def of_return(result: Any, registered: bool, trained: bool) -> str | None:
    """Of the function's return with this result; None if it is right."""
    if not registered:
        alone = f"what trains in a process of its own is a command: `{command('-- COMMAND')}`"
        return f"ended without run.restore(...); {NEEDED}; {alone}"
    if not trained:
        return f"ended without a step of run.steps(...); {NEEDED}"
    if not isinstance(result, (dict, type(None))):
        return "must return a dict of numbers, or nothing"
    return None


OWN_TOO_LATE = (
    "{} of run.own(...) has changed after the update of the step, which no other rank knows: play, draw and count "
    "before the step's first optimizer.step()"
)
OWN_WITH_SHARES = (
    "run.own(...) with train.shares: what is a rank's own would change the weights with the number of ranks; leave "
    "train.shares out"
)
MOST_OBJECTS = 2_000_000  # that may be looked at: a tenth of a second


class StepChecks:
    """Checks that an iteration of run.steps(...) is one step: it makes the update of what it has drawn itself.

    An iteration that leaves gradients to the next one is noticed where two iterations in a row make no update, or in
    the first iterations. A batch that is drawn in one iteration and trained in the next is not drawn again by a run
    that resumes between the two. The same holds for an iterator that is advanced from iteration to iteration: each
    attempt would start it from its first batch. Both leave a trace in the first two iterations: an object that is made
    or advanced in the first, and still alive at its end. So no step after these is slowed.
    """

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._iteration = 0
        self._gradients = _Gradients([])  # at the beginning of step `_gradients_of` (from 0)
        self._gradients_of = -1
        self._before: set[int] = set()  # the tensors at the beginning of the first iteration, by id
        self._given: dict[int, int] = {}  # the batches that each iteration over a DataLoader had given by then, by id
        self._unregistered: Unregistered | None = None
        self._used: list[weakref.ref[Tensor]] = []  # the inputs of the first iteration
        self._earlier: dict[int, weakref.ref[Tensor]] = {}  # what the first iteration has made and left, by id

        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Not a method: a copy of the module has this hook too, and would copy all that a method belongs to."""
            watched = self._iteration < 3 and module.training and torch.is_grad_enabled()
            if watched and not torch.compiler.is_compiling():
                self._check_inputs(compat.tree_leaves((args, kwargs)))

        self._hooks = [
            module.register_forward_pre_hook(before_forward, with_kwargs=True) for module in registered.modules
        ]

    def begin(self, step: int) -> None:
        """The iteration of `step` (from 0) begins."""
        if self._iteration > 2:
            return
        self._iteration += 1
        self._keep_gradients(step)
        if self._iteration == 1:
            self._before = {id(tensor) for tensor in _tensors()}
            self._given = dict(_iterations())
            if not step and not self._registered.opaque:
                self._unregistered = Unregistered(self._registered, _objects())
        elif self._iteration == 3:
            for hook in self._hooks:
                hook.remove()
            self._earlier.clear()

    def end(self, step: int) -> None:
        """The body of the iteration of `step` (from 0) is done. Raises ConfigError."""
        if self._iteration != 1:
            return
        self._registered.check_sharding()
        if self._unregistered and (problem := self._unregistered.problem()):
            raise ConfigError(problem)
        if any(given > self._given.get(iteration, 0) for iteration, given in _iterations()):
            raise ConfigError(
                f"step {step + 1} drew a batch from an iteration over a DataLoader that goes beyond the step; each "
                "attempt would begin it again, a registered one too. Write `for batch in run.steps(run.stream(loader), "
                "count=N)`; for a second loader `more = run.batches(run.loader(dataset, batch_size))` before the loop "
                "and `next(more)` in it"
            )
        known = self._before | {id(tensor) for tensor in self._registered.own_tensors()}
        known |= {id(tensor) for used in self._used if (tensor := used()) is not None}
        self._earlier = {id(tensor): weakref.ref(tensor) for tensor in _tensors() if id(tensor) not in known}
        self._before.clear()

    def no_update(self, step: int) -> None:
        """The iteration `step` (from 0) has made no update. Raises ConfigError if it leaves gradients behind."""
        changed = self._gradients_of == step and not self._gradients.unchanged()
        if changed and not self._registered.has_skipped() and self._gradients.any():
            raise ConfigError(
                f"step {step + 1} left gradients without an optimizer.step(): where K iterations make one update, "
                "write run.steps(..., accumulate=K), and `if run.sync_gradients:` around optimizer.step(); end an "
                "iteration that skips its update with optimizer.zero_grad(); register the GradScaler if there is one"
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
                if self._iteration == 1:
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


NAMES = {Optimizer: "optimizer", LRScheduler: "scheduler", GradScaler: "scaler", AveragedModel: "average"}
MOST_ITEMS, MOST_DEPTH = 64, 4  # within a registered object


class Unregistered:
    """Finds what a custom loop uses and has forgotten to register: a resumed run would begin it anew, without a word.

    It looks at the objects of torch that exist as the first step begins, which bear a state from step to step.
    """

    def __init__(self, registered: Registered, objects: Iterable[Any]) -> None:
        self._updated = {id(parameter) for parameter in registered.parameters()}
        has = {id(each) for each in within(registered.objects, set())}
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
            updates = {id(parameter) for parameter in parameters_of(each)}
            has_state = any(value is not None for state in each.state.values() for value in state.values())
            return has_state and not updates <= self._updated
        return not isinstance(each, GradScaler) or each.is_enabled()


def within(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
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
            yield from within(part, seen, depth + 1)


OTHER_MODE = (
    "WARNING: other modules are in training mode than before the run was resumed, so it may end with other results: "
    "call model.train() after each validation, and model.eval() only where every attempt does"
)
OTHER_FROZEN = (
    "WARNING: other parameters are frozen than before the run was resumed, so it may end with other results: freeze "
    "them where every attempt does, as in `if epoch >= 3`, not `if epoch == 3`"
)


class Modes:
    """How a custom loop has set its modules, which no checkpoint restores: in which mode they are, and what is frozen.

    The function must do so again in each attempt. The position has a fingerprint of it, taken when the update of the
    last step began, so that the next attempt notices if it has not.

    Only the registered modules count. Wrappers, such as DistributedDataParallel and torch.compile, do not: the next
    attempt may do without them.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` is called with a warning."""
        self._say = say
        self._parts: list[nn.Module] = []
        self._parameters: list[Tensor] = []
        self._before = ""
        self.fingerprint = ""  # as the newest update began: checksums of the modes, and of what is frozen

    def resume(self, position: Position) -> None:
        """Compare the next fingerprint with the one of this position. Not at the end of an epoch, between whose steps
        and the next one's a loop may change the modes."""
        self._before = position.modes if position.batches and not position.over else ""

    def update_begins(self, modules: Sequence[nn.Module]) -> None:
        """Take a new fingerprint of these modules, the same at each call. Say so if a resume has changed anything."""
        if not self._parts:
            self._parts = [part for module in modules for part in module.modules() if not any(part.children())]
            self._parameters = [parameter for module in modules for parameter in module.parameters()]
        training = crc32(bytes([part.training for part in self._parts]))
        trained = crc32(bytes([parameter.requires_grad for parameter in self._parameters]))
        self.fingerprint = f"{training:08x}{trained:08x}"
        before, self._before = self._before, ""
        if before not in ("", self.fingerprint):
            self._say(OTHER_MODE if before[:8] != self.fingerprint[:8] else OTHER_FROZEN)

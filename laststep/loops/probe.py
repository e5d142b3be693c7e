"""The probe: what `prove` adds to a loop. It notes the bits of each step, and strikes a rank in a planned place."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import random
import signal
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laststep.checkpoint.manager import Position
from laststep.checkpoint.shards import is_distributed
from laststep.loops.digest import PLAIN, digest, digests, leaves_of
from laststep.loops.registered import TORCH_TYPES, Registered
from laststep.ranks.stop import Stop
from laststep.ranks.world import World
from laststep.records.probes import LEAST_IN_TIME, ProbedStep, ProbeFile, ProbePlan, Strike, Variable
from laststep.rundir import RunDir


class Probe:
    """Follows one loop. It changes nothing of what the loop computes."""

    def __init__(self, plan: ProbePlan, run: RunDir, world: World, stop: Stop) -> None:
        self.variables = Variables()
        self.validation_batches = plan.validation_batches
        self._plan = plan
        self._rank, self._attempt = world.rank, world.number or 0
        self._stop = stop
        # A SIGTERM that Slurm has not sent would look like a fault, and the job would come back.
        self._ends_by = (signal.SIGINT if world.on_slurm else signal.SIGTERM).name
        self._file = ProbeFile(run, world.rank)
        self._begun: ProbedStep | None = None  # the step under way
        self._validated = 0  # batches since the last step
        self._observer: Any = _observer(plan, run, world.rank)
        self._own: list[str] = []  # names of registered objects that are not torch's
        self._began, self._asked = time.monotonic(), False  # asked for a stop

    def watch(self, registered: Any) -> None:
        """Note the inputs of this model, and the updates of this optimiser."""
        self.variables.leave_out(registered)
        if self._observer is not None:
            self._observer.watch(registered)
        if isinstance(registered, nn.Module):
            registered.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        elif isinstance(registered, Optimizer):
            registered.register_step_post_hook(self._note_update)

    def begin_step(self, step: int, epoch: int, step_of_epoch: int, batch: Any, variables: dict[str, Variable]) -> None:
        """A step has its batch, and the user's code these variables; all numbers count from 1."""
        if step < self._plan.since:
            if self._plan.ends_in(step, epoch, step_of_epoch):
                self._strike(Strike(self._ends_by, 0, step))
            return
        self._begun = {
            "attempt": self._attempt,
            "step": step,
            "epoch": epoch,
            "batch": digest(batch),
            "inputs": [],
            "updates": 0,
            "state": {},
            "beside": [],
            "rows": [],
            "variables": variables,
        }
        self._validated = 0
        if self._observer is not None:  # before a stop, whose grace time may be short
            self._observer.begin_step(step, batch)
        strike = self._plan.strike
        if strike is not None and (strike.step, strike.batch) == (step, None):
            self._strike(strike)
        elif self._plan.ends_in(step, epoch, step_of_epoch):
            self._strike(Strike(self._ends_by, 0, step))
        elif self._plan.seconds is not None and self._rank == 0 and step >= LEAST_IN_TIME:
            self._end_in_time(self._plan.seconds)

    def _end_in_time(self, seconds: float) -> None:
        """Ask for a stop, once, when the process has run that long."""
        if time.monotonic() > self._began + seconds and not self._asked:
            self._asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    def watch_registered(self, objects: Mapping[str, Any], registered: Registered) -> None:
        """Watch what a function has registered: its models and optimisers, without their wrappers."""
        for each in objects.values():
            self.variables.leave_out(each)
        for each in (*registered.modules, *registered.optimizers):
            self.watch(each)
        self._own = [name for name, each in registered.objects.items() if not isinstance(each, TORCH_TYPES)]

    def begin_custom_step(self, position: Position, batch: Any) -> None:
        """As `begin_step`, after this position of a custom loop; called from the function."""
        variables = self.variables.of_callers()
        self.begin_step(position.step + 1, position.epoch + 1, position.batches + 1, batch, variables)

    def noting(self, shares: Iterator[Any]) -> Iterator[Any]:
        """These shares of the batch of the step under way, of which it then has these parts."""
        for share in shares:
            if self._begun is not None:
                self._begun["batch"] = digest((self._begun["batch"], share))
            yield share

    def end_step(self, state: Any) -> None:
        """The step is done; `state` is what a checkpoint would hold now."""
        if self._observer is not None:
            self._observer.end_step()
        if self._begun is not None:
            self._begun["state"] = digests(state)
            own = {name: state[name] for name in self._own if name in state}
            self._begun["beside"] = [name for name, leaf in leaves_of(own) if not _is_array(leaf)]
            self._begun["rows"] = [name for name, leaf in leaves_of(state) if is_distributed(leaf)]
            self._file.write(self._begun)
            self._begun = None

    def begin_validation_batch(self, after: int) -> None:
        """A batch of the validation after this step begins."""
        self._validated += 1
        self._file.write({"attempt": self._attempt, "after": after, "validation_batch": self._validated})
        strike = self._plan.strike
        if strike is not None and (strike.step, strike.batch) == (after, self._validated):
            self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        """Send the signal, on its rank. All ranks follow the same plan, so all hold here until they agree to stop."""
        number = signal.Signals[strike.signal]
        if strike.rank == self._rank:
            os.kill(os.getpid(), number)
        if number != signal.SIGKILL:
            self._stop.await_agreement()

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # the model is compiled: leave this out of it
            return
        if self._begun is not None and module.training and torch.is_grad_enabled():
            found, inputs = digest((args, kwargs)), self._begun["inputs"]
            if inputs[-1:] != [found]:  # in the first step of an attempt the rehearsal runs the same batch before it
                inputs.append(found)

    def _note_update(self, *_: Any) -> None:
        if self._begun is not None:
            self._begun["updates"] += 1


def _observer(plan: ProbePlan, run: RunDir, rank: int) -> Any:
    """What an upper room has asked to see each step; None if nothing."""
    if plan.observer is None:
        return None
    module, _, name = plan.observer.partition(":")
    return getattr(importlib.import_module(module), name)(run, rank, plan.asked)


LASTSTEP = str(Path(__file__).resolve().parent.parent)
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
MOST_BYTES = 1 << 24  # larger tensors are data sets, as a rule, and take long
MOST_ITEMS, MOST_DEPTH = 64, 4


class Variables:
    """Finds the variables of the user's code, except for what is registered."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # ids of what is registered, and of all that belongs to it
        self._found: dict[str, Variable] = {}
        self._seen: set[int] = set()

    def leave_out(self, registered: Any) -> None:
        """These need not be named: a checkpoint holds them."""
        self._known.add(id(registered))
        if isinstance(registered, nn.Module):
            for part in (*registered.modules(), *registered.parameters(), *registered.buffers()):
                self._known.add(id(part))

    def of_callers(self) -> dict[str, Variable]:
        """The variables of the user's functions on the stack, and the global ones that these functions use."""
        self._begin()
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "_call_function":  # of the custom loop
            if _is_users(frame.f_code.co_filename):
                self._walk_frame(frame)
            frame = frame.f_back
        return self._found

    def of_object(self, name: str, owner: Any) -> dict[str, Variable]:
        """The attributes of an object of the user's."""
        self._begin()
        for attribute, value in vars(owner).items():
            self._walk(f"{name}.{attribute}", value, 0)
        return self._found

    def _begin(self) -> None:
        self._found, self._seen = {}, set()

    def _walk_frame(self, frame: FrameType) -> None:
        for name, value in frame.f_locals.items():
            self._walk(name, value, 0)
        self._walk_globals(frame.f_code.co_names, frame.f_globals)

    def _walk_globals(self, names: tuple[str, ...], of_module: Mapping[str, Any]) -> None:
        for name in names:
            if name in of_module:
                self._walk(name, of_module[name], 0)

    def _walk(self, name: str, value: Any, depth: int) -> None:
        """Note a value, or what it is made of; nothing of an object that does not bear it."""
        with contextlib.suppress(Exception):
            self._walk_value(name, value, depth)

    def _walk_value(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self._known or depth > MOST_DEPTH or len(self._found) > 2000:
            return
        if isinstance(value, PLAIN):
            self._note(name, "value", value)
            return
        if isinstance(value, (Tensor, numpy.ndarray, numpy.number)) and not _is_array(value):
            self._note(name, "value", value.item())
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (Tensor, numpy.ndarray)):
            if value.nbytes <= MOST_BYTES:
                self._note(name, "value", value)
        elif (state := _generator_state(value)) is not None:
            self._note(name, "generator", state)
        elif isinstance(value, Iterator):
            self._note(name, "iterator", None)
        elif isinstance(value, (Mapping, list, tuple)):
            self._walk_items(name, value, depth)
        elif isinstance(value, FunctionType):
            if _is_users(value.__code__.co_filename):
                self._walk_globals(value.__code__.co_names, value.__globals__)
        elif not isinstance(value, type):
            self._walk_object(name, value, depth)

    def _walk_items(self, name: str, items: Any, depth: int) -> None:
        if len(items) > MOST_ITEMS:
            return
        pairs = items.items() if isinstance(items, Mapping) else enumerate(items)
        for key, item in list(pairs):
            self._walk(f"{name}[{key!r}]", item, depth + 1)

    def _walk_object(self, name: str, value: Any, depth: int) -> None:
        module = type(value).__module__ or ""
        if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
            self._note(name, "value", value.state_dict())
        elif module.partition(".")[0] not in ("laststep", "torch", "torchvision", "builtins"):
            for attribute, item in list(getattr(value, "__dict__", {}).items()):
                self._walk(f"{name}.{attribute}", item, depth + 1)

    def _note(self, name: str, kind: str, value: Any) -> None:
        if kind == "value" and isinstance(value, (int, float)):
            self._found.setdefault(name, {"kind": "number", "digest": repr(value)})
        else:
            self._found.setdefault(name, {"kind": kind, "digest": digest(value)})


def _is_array(value: Any) -> bool:
    """Whether this is a tensor or an array of more than one number."""
    return value.numel() != 1 if isinstance(value, Tensor) else isinstance(value, numpy.ndarray) and value.size != 1


def _generator_state(value: Any) -> Any:
    """The state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return value.getstate() if isinstance(value, random.Random) else None


def _is_users(file: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return file.endswith(".py") and not installed and not file.startswith((LASTSTEP, STANDARD_LIBRARY))

"""The variables of the user's code as a step begins: `prove` names those that a resume does not bring back."""

from __future__ import annotations

import contextlib
import inspect
import random
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from laststep.loops.digests import PLAIN, digest
from laststep.records.probes import Variable

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
        while frame is not None and frame.f_code.co_name != "_train":  # of the custom loop, which calls the function
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
        elif not isinstance(value, type) and hasattr(value, "__dict__"):
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
            for attribute, item in list(vars(value).items()):
                self._walk(f"{name}.{attribute}", item, depth + 1)

    def _note(self, name: str, kind: str, value: Any) -> None:
        self._found.setdefault(name, {"kind": kind, "digest": digest(value)})


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

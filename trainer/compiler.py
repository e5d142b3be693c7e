"""torch's compiler, left out of a process that compiles nothing.

DistributedDataParallel, torch.optim and torchvision import torch._dynamo, and with it sympy and half of
torch._inductor: hundreds of files, over a network file system too, only to ask it for what does nothing where nothing
is compiled. `leave_out` puts a module in its place that has these few answers. Whatever else is asked of it loads the
real one, so a task that compiles by itself gets what it wants, and so does a torch that asks for more than this one
knows of.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def leave_out() -> None:
    """Until it is needed, torch's compiler is not imported. Does nothing when it is already."""
    if NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def _bring_in() -> None:
    """Import the compiler itself, in place of what stands in for it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in _ANSWERS:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    vars(sys.modules["torch"]).pop("_dynamo", None)  # torch asks itself for its parts while it imports them
    importlib.import_module(NAME)


def _disable(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """What is never compiled needs no exception from that; a decorator, with arguments or without."""
    return function or (lambda decorated: decorated)


def _is_compile_supported(device: str) -> bool:
    """torchvision imports this by name, to ask it only where an operator is compiled."""
    _bring_in()
    return bool(sys.modules[f"{NAME}.utils"].is_compile_supported(device))


_ANSWERS: dict[str, dict[str, Any]] = {
    NAME: {"disable": _disable, "graph_break": lambda: None},
    f"{NAME}.utils": {
        "get_optimize_ddp_mode": lambda: "ddp_optimizer",  # torch's default, where nothing was configured
        "is_compile_supported": _is_compile_supported,
    },
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in _ANSWERS:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name.startswith("__"):
            raise AttributeError(name)
        _bring_in()
        return getattr(sys.modules[self.__name__], name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _ANSWERS:
            return ModuleSpec(name, self, is_package=name == NAME)
        if name.startswith(f"{NAME}."):
            _bring_in()
            return ModuleSpec(name, _Imported())
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_ANSWERS[module.__name__])


class _Imported(Loader):
    """For a part of the compiler that is imported first of all: importing the whole has imported it already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

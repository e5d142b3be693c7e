"""torch's compiler: what it makes is kept for the next attempt, and it is left out of a process that compiles nothing.

DistributedDataParallel, torch.optim and torchvision import torch._dynamo, and with it sympy and half of
torch._inductor: hundreds of files, over a network file system too, only to ask it for what does nothing where nothing
is compiled. `leave_out` puts a module in its place that has these few answers. Whatever else is asked of it loads the
real one, so a task that compiles by itself gets what it wants, and so does a torch that asks for more than this one
knows of.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def keep_in(folder: Path) -> None:
    """From now on torch keeps there what it compiles, unless the user has named a place. Ranks may share it.

    By default it lies in /tmp, where the next attempt, on other nodes, does not find it.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:  # a file system without locks, as some Lustre mounts: torch, which locks there, would fail
            return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / _processor()))


def _processor() -> str:
    """A name for this kind of processor: C++ is compiled for the very one at hand, but kept by names that do not say
    which it was."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


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

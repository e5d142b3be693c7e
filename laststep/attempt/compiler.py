"""torch's compiler: its cache is kept for the next attempt, and a process that compiles nothing does not import it.

DistributedDataParallel, torch.optim and torchvision import torch._dynamo, and with it sympy and half of
torch._inductor: hundreds of files, perhaps over a network file system. They use only functions of it that do nothing if
nothing is compiled. `defer_import` puts a stand-in in its place that has these few functions. Anything else that is
asked of the stand-in imports the real module, so a task that compiles by itself gets it, and so does a newer torch that
asks for more.

The stand-in can be switched off: with LASTSTEP_KEEP_COMPILER=1 in the environment the compiler is imported as usual.
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
SWITCH = "LASTSTEP_KEEP_COMPILER"
_notes: list[Callable[[bool], None]] = []  # to be called once the compiler is imported


def cache_in(folder: Path) -> None:
    """Have torch keep what it compiles in `folder`, unless the user has chosen a place. Ranks may share it.

    Torch's own default is in /tmp, where the next attempt, on other nodes, does not find it.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:  # no locks on this file system, as on some Lustre mounts: torch would fail to lock there
            return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / _processor()))


def _processor() -> str:
    """A name for this model of processor. Torch compiles C++ for the processor that it runs on, but its cache does not
    distinguish processors."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def defer_import() -> None:
    """Import torch's compiler only once it is needed, or now if this is switched off. From then on it keeps a graph for
    each shape, see `compile_each_shape`."""
    if f"{NAME}.config" in sys.modules or os.environ.get(SWITCH, "0") not in ("", "0"):  # which no stand-in has
        _keep_shapes_apart()
    elif NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def watch(note: Callable[[bool], None]) -> None:
    """Call `note` whenever the compiler begins and ends its work in this process, from its import on."""
    if f"{NAME}.config" in sys.modules:
        _tell(note)
    else:
        _notes.append(note)


def _tell(note: Callable[[bool], None]) -> None:
    from laststep import compat  # not at the top: tests load this file alone

    compat.on_compiling(note)


def _import_compiler(asked_for: str) -> None:
    """Replace the stand-in by the compiler itself, since it has no `asked_for`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in STAND_INS:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    vars(sys.modules["torch"]).pop("_dynamo", None)  # torch reads this attribute while it imports the compiler
    importlib.import_module(NAME)
    _keep_shapes_apart()


def _keep_shapes_apart() -> None:
    from laststep.compat.compiler import compile_each_shape  # not at the top: tests load this file alone
    from laststep.say import say

    compile_each_shape(say)
    while _notes:
        _tell(_notes.pop())


def _disable(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that exempts a function from compilation: nothing to do."""
    return function or (lambda decorated: decorated)


def _is_compile_supported(device: str) -> bool:
    """torchvision imports this by name, and calls it only where an operator is compiled."""
    _import_compiler(f"{NAME}.utils.is_compile_supported()")
    return bool(sys.modules[f"{NAME}.utils"].is_compile_supported(device))


# Each module that has a stand-in, with the attributes that torch and torchvision use if nothing is compiled.
STAND_INS: dict[str, dict[str, Any]] = {
    NAME: {"disable": _disable, "graph_break": lambda: None},
    f"{NAME}.trace_rules": {"clear_lru_cache": lambda: None},  # where torchvision was imported before the ranks meet
    f"{NAME}.utils": {
        "get_optimize_ddp_mode": lambda: "ddp_optimizer",  # torch's default
        "is_compile_supported": _is_compile_supported,
    },
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in STAND_INS:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name.startswith("__"):
            raise AttributeError(name)
        _import_compiler(f"{self.__name__}.{name}")
        return getattr(sys.modules[self.__name__], name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in STAND_INS:
            return ModuleSpec(name, self, is_package=name == NAME)
        if name.startswith(f"{NAME}."):
            _import_compiler(name)
            return ModuleSpec(name, _Imported())
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(STAND_INS[module.__name__])


class _Imported(Loader):
    """For a part of the compiler that is asked for first: importing the whole compiler has just imported it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

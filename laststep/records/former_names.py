"""Up to version 0.1 the package was called `trainer`. Runs that such a version began still resume.

Their configuration may name a module of it (`task: trainer.tasks.language.Language`), and the user's code may import
from it. Both are read as names of `laststep`, unless the user has a `trainer` of their own: theirs always comes first.
A new run whose code imports a `trainer` that does not exist gets Python's own error.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir

FORMER, PRESENT = "trainer", "laststep"
MOVED = {"world": "ranks"}  # parts that users may build on, and that have another name
MARK = "_FOLDER_OF_LASTSTEP"  # a name in the folder trainer/ of a clone, which has the public names only
IN_CLONE = (Path(__file__).resolve().parent.parent.parent / "launch.py").exists()  # or in the code copy of one


def is_of_former_version(run: RunDir) -> bool:
    """Whether a version began this run whose package was called `trainer`. Raises OSError."""
    first = next(iter(read_submissions(run.submissions)), None)
    return first is not None and str(first.get("version", "0.1")).split(".")[:2] in (["0", "0"], ["0", "1"])


def present(name: str) -> str:
    """A dotted name of a run of a former version, as it is called now: `trainer.task.Task` is `laststep.task.Task`."""
    if name.startswith(f"{FORMER}.") and _theirs() is None:
        return _present(name)
    return name


def _present(name: str) -> str:
    _, *inner = name.split(".")
    return ".".join([PRESENT, *(MOVED.get(part, part) for part in inner[:1]), *inner[1:]])


def resolve_for(run: RunDir) -> None:
    """In a rank: `resolve` for a run of a former version. Does so in a clone's code copy too, which leaves out the
    folder trainer/."""
    try:
        needed = IN_CLONE or is_of_former_version(run)
    except OSError:  # the disk does not answer; what needs it next says so
        needed = True
    if needed:
        resolve()


def resolve() -> None:
    """From now on, in this process, `import trainer` gives `laststep` where there is no other `trainer`."""
    if not any(isinstance(finder, _First) for finder in sys.meta_path):
        sys.meta_path.insert(0, _First())
        sys.meta_path.append(_Last())


class _First(MetaPathFinder):
    """Finds the user's own `trainer` ahead of a clone's folder trainer/, and the modules of `trainer` where that is
    ours: from the package's folder Python would load a second copy of them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == FORMER:
            return _theirs()
        return _spec(name) if name.startswith(f"{FORMER}.") and _is_ours(sys.modules.get(FORMER)) else None


class _Last(MetaPathFinder):
    """Finds `trainer` where nobody else has."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return _spec(name) if name == FORMER else None


def _spec(name: str) -> ModuleSpec | None:
    now = _present(name)
    return ModuleSpec(name, _Loader(now), is_package=True) if importlib.util.find_spec(now) is not None else None


class _Loader(Loader):
    """Gives the module of the present name itself: a second copy would have classes of its own."""

    def __init__(self, present_name: str) -> None:
        self._name = present_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put that of the former name there


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and (module is sys.modules[PRESENT] or hasattr(module, MARK))


def _theirs() -> ModuleSpec | None:
    """The user's own `trainer`, at the first place of Python's path that has one."""
    specs = (PathFinder.find_spec(FORMER, [place]) for place in sys.path)
    return next((spec for spec in specs if spec is not None and not _is_door(spec.origin)), None)


def _is_door(path: str | None) -> bool:
    """Whether this is the __init__.py of the folder trainer/ of a clone."""
    return path is not None and MARK in Path(path).read_bytes()[:4096].decode(errors="replace")

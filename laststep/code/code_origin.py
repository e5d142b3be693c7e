"""Where a run's code comes from: the user's repository, its commit, and the folders in which Python looks for modules.

The ranks of a job import modules from the code's copy and work in the folder where the command was typed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import starmap
from pathlib import Path

from laststep import compat
from laststep.code.task_check import find_spec
from laststep.config.config import Config
from laststep.ranks.process import started
from laststep.rundir import RunDir
from laststep.runs.run_folders import PROJECT, working_folder

NOT_CODE = ("__pycache__", "node_modules", "site-packages", "dist-packages")
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")  # a folder that holds one of these is a Python environment
# Laststep itself: a clone, whose files are all code, or a folder of installed packages.
CLONE = PROJECT if (PROJECT / "launch.py").exists() else None


@dataclass(frozen=True)
class CodeOrigin:
    """Where the code of a run comes from; written into its copy."""

    repository: str | None  # the user's; None where the task is Laststep's own, or that of an installed package
    modules: list[str]  # files and folders in that repository: the task's module, and those of editable installs
    git_folder: str  # the folder whose commit and uncommitted changes are recorded
    commit: str | None  # None outside git
    python_path: list[str]  # folders in the copy where Python looks for modules, relative to the copy

    def save(self, code: Path) -> None:
        """Write this into the copy."""
        _file(code).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def origin_of(run: RunDir, config: Config) -> CodeOrigin:
    """Where the code in the run's copy comes from; where there is no copy yet, what would be copied."""
    try:
        return CodeOrigin(**json.loads(_file(run.code).read_text()))
    except (OSError, ValueError, TypeError):  # no copy, or one that another version of Laststep has made
        return look_up(config.task, working_folder(run))


def look_up(task: str, folder: Path) -> CodeOrigin:
    """Find the code of a task that is named in `folder`."""
    name = task.partition(".")[0]
    spec = find_spec(name, [folder]) if "." in task else None
    own = [(name, path) for path in _files_of(spec)] if spec else []
    repository = _repository(own[0][1], folder) if own else None
    editable = list(compat.editable_modules().items())
    modules = [str(path) for _, path in own + editable if repository and path.is_relative_to(repository)]
    # As Python searches: what an editable install knows comes after sys.path.
    places = [*starmap(_parent, own), folder, *map(Path, sys.path), *starmap(_parent, editable)]
    inside = [_inside(place, [base for base in (CLONE, repository) if base]) for place in places]
    git_folder = repository or CLONE or folder
    return CodeOrigin(
        repository=str(repository) if repository else None,
        modules=list(dict.fromkeys(modules)),
        git_folder=str(git_folder),
        commit=current_commit(git_folder),
        python_path=list(dict.fromkeys([".", *filter(None, inside)])),
    )


def search_path(run: RunDir, config: Config, runs_copy: bool) -> list[Path]:
    """Where the ranks of a resumed run look for modules first: in the copy, if there is one and they run it, or in the
    folder where the run was first submitted or started."""
    if runs_copy and run.code.exists():
        return [run.code / place for place in origin_of(run, config).python_path]
    return [working_folder(run)]


def python_path(origin: CodeOrigin, code: Path) -> str:
    """PYTHONPATH of a job's ranks: the copy's folders, ahead of editable installs; then the user's own PYTHONPATH."""
    return _joined(*((code / place) for place in origin.python_path))


def live_python_path(folder: Path) -> str:
    """PYTHONPATH of ranks that run the live code in `folder`; includes the folder of the script that started them."""
    inside = [path for path in map(Path, sys.path) if path.name and _inside(path, [folder])]
    return _joined(PROJECT, folder, *inside)


def current_commit(folder: Path) -> str | None:
    """The commit of the repository that this folder is in; None outside git."""
    found = git(folder, "rev-parse", "HEAD")
    return found.decode().strip() if found else None


def git(folder: Path, *words: str) -> bytes | None:
    """git's output; None where git is not installed or the folder is not in a repository."""
    with contextlib.suppress(FileNotFoundError):
        done = started(lambda: subprocess.run(["git", "-C", str(folder), *words], capture_output=True))
        return None if done.returncode else done.stdout
    return None


def is_environment(folder: Path) -> bool:
    """Whether a folder is a Python environment."""
    return any(os.path.exists(folder / mark) for mark in ENVIRONMENT_MARKS)


def _file(code: Path) -> Path:
    return code / ".laststep.json"


def _files_of(spec: ModuleSpec) -> list[Path]:
    """The file of a module, or the folders of a package. A link that an editable install has made is followed."""
    if spec.origin and spec.submodule_search_locations is not None:
        return [Path(spec.origin).resolve().parent]
    places = spec.submodule_search_locations or filter(None, [spec.origin])
    return [Path(place).resolve() for place in places if os.path.exists(place)]


def _repository(module: Path, folder: Path) -> Path | None:
    """The user's repository: the one in git that has this module, else the folder where the command was typed."""
    if (CLONE and module.is_relative_to(CLONE)) or any(part in NOT_CODE for part in module.parts):
        return None
    top = git(module.parent, "rev-parse", "--show-toplevel")
    if top and git(module.parent, "ls-files", "--cached", "--others", "--exclude-standard", "--", str(module)):
        return Path(os.fsdecode(top.rstrip(b"\n")))
    return folder if module.is_relative_to(folder) else None


def _parent(name: str, path: Path) -> Path:
    """The folder from which Python imports the module `name` that lies at `path`."""
    return path.parents[name.count(".")]


def _inside(place: Path, bases: Sequence[Path]) -> str | None:
    """A folder's path relative to the base that it is in; None when it is in none of them, or in an environment."""
    place = place.resolve()
    for base in bases:
        if place.is_relative_to(base) and os.path.isdir(place):
            relative = place.relative_to(base)
            between = [place, *place.parents][: len(relative.parts)]
            if not any(one.name in NOT_CODE or is_environment(one) for one in between):
                return str(relative)
    return None


def _joined(*places: Path) -> str:
    users = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return os.pathsep.join(dict.fromkeys([*map(str, places), *users]))

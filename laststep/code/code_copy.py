"""The code copy: every attempt of a job runs the code as it was at submission, even if files are edited meanwhile.

It holds the files of Laststep and of the user's repository, which `look_up` finds: the tracked files and the untracked
ones that git does not ignore. Without git: all files except hidden folders, environments and caches. The folder
`trainer/` of a clone of Laststep is left out: it would hide a `trainer` of the user's
(laststep/records/former_names.py).

The ranks of a job import modules from the copy and work in the folder where the command was typed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec
from itertools import starmap
from pathlib import Path

from laststep import compat, script
from laststep.code.task_check import find_spec
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.ranks.process import started
from laststep.records.former_names import FORMER, PRESENT
from laststep.rundir import RunDir, aside
from laststep.runs.run_folders import OTHERS_MAY_WRITE, PROJECT, working_folder

COPY_THREADS = 16  # on a network file system each waits for its file
MOST_FILES = 50_000
MOST_MB = 1000  # a larger copy is refused
MUCH_MB = 100  # a larger copy gets a warning
ABANDONED_S = 86_400.0  # no copy takes a day
METADATA = ("METADATA", "PKG-INFO", "")  # in .dist-info; in .egg-info; .egg-info that is a file itself
NOT_CODE = ("__pycache__", "node_modules", "site-packages", "dist-packages")
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")  # a folder that holds one of these is a Python environment
# Laststep itself: a clone, whose files are all code, or a folder of installed packages.
CLONE = PROJECT if (PROJECT / "launch.py").exists() else None
NAME, VERSION = (re.compile(rf"^{field}: *(\S+)", re.MULTILINE) for field in ("Name", "Version"))


def copy_code(run: RunDir, config: Config) -> None:
    """Copy the code, its uncommitted changes and the list of installed packages into the run's folder.

    Raises ConfigError when that fails, and when there is too much to be code.
    """
    partial = aside(run.code)
    remove_abandoned(run.path.glob(f"{run.code.name}*.tmp"))
    root = Path(config.launch.root)
    origin = look_up(config, working_folder(run))
    try:
        ours, theirs = _files_of_laststep(root), list[Path]()
        _check_size(PROJECT, ours)
        if origin.repository is not None:
            folder = Path(origin.repository)
            theirs = list(dict.fromkeys([*code_files(folder, root), *_generated(origin)]))
            _check_size(folder, theirs)
        # What is there already is not copied: of two files of one path, the user's stays, but within the package.
        _copy(PROJECT, [path for path in ours if path.parts[0] == PRESENT], partial)
        if theirs:
            _copy(Path(str(origin.repository)), theirs, partial)
        _copy(PROJECT, ours, partial)
        origin.save(partial)
        if (diff := git(Path(origin.git_folder), "diff", "HEAD", "--", ".")) is not None:
            run.diff.write_bytes(diff)
        run.packages.write_text("\n".join(sorted(_packages(), key=str.lower)) + "\n")
        try:
            partial.rename(run.code)
        except OSError:
            if not run.code.exists():  # else another command has just copied it
                raise
    except OSError as error:
        raise ConfigError(f"launch.root={root}: the code could not be copied to {run.code}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_abandoned(found: Iterable[Path]) -> None:
    """Remove the folders that commands which were killed have left, but none that is being made."""
    for partial in found:
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(partial, ignore_errors=True)


def _files_of_laststep(root: Path) -> list[Path]:
    """Laststep's own code files, relative to PROJECT."""
    if CLONE:
        return [path for path in code_files(CLONE, root) if path.parts[0] != FORMER]
    return [Path("laststep") / path for path in _walk(PROJECT / "laststep", root)]


def _check_size(folder: Path, files: Sequence[Path]) -> None:
    """Warn if these files of a folder are large for code. Raises ConfigError when they are too large."""
    sizes = {path: (folder / path).stat().st_size / 1e6 for path in files}
    total = sum(sizes.values())
    largest = sorted(files, key=lambda path: -sizes[path])[:3]
    content = f"{total:,.0f} MB (largest: {', '.join(f'{path} {sizes[path]:,.0f} MB' for path in largest)})"
    if total > MOST_MB:
        raise ConfigError(f"{folder} is too large to copy for each run: {content}; {_fix(folder)}")
    if total > MUCH_MB:
        print(f"warning: {folder}: the run's copy of the code takes {content}; {_fix(folder)}", file=sys.stderr)


def _fix(folder: Path) -> str:
    in_git = git(folder, "rev-parse") is not None
    return f"name what is not code in .gitignore{'' if in_git else ' after `git init`, or move it elsewhere'}"


def code_files(folder: Path, root: Path) -> list[Path]:
    """The code files of a folder, relative to it. Raises ConfigError when there are too many files to be code."""
    files = list(itertools.islice(_files(folder, root, ()), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise ConfigError(f"{folder} has over {MOST_FILES} files: {_fix(folder)}")
    return files


def _files(folder: Path, root: Path, around: Sequence[Path]) -> Iterator[Path]:
    """The code files of a folder that was reached from the folders `around`."""
    around = (*around, folder.resolve())
    listed = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for path in map(Path, _split(listed)) if listed else _walk(folder, root):
        place = folder / path
        if _holds_runs(place, root, folder):
            continue
        if place.is_file():  # no pipe or socket, and no link that leads nowhere
            yield path
        elif place.is_dir() and not any(outer.is_relative_to(place.resolve()) for outer in around):
            # A submodule, or a link to a folder.
            yield from (path / inner for inner in _files(place, root, around))


def _holds_runs(place: Path, root: Path, folder: Path) -> bool:
    """Whether a place in a folder belongs to the runs, which are not code."""
    return place.is_relative_to(root) and not folder.is_relative_to(root)


def _generated(origin: CodeOrigin) -> Iterator[Path]:
    """Modules that the task needs and git ignores: a generated _version.py, a compiled extension."""
    folder = Path(str(origin.repository))
    suffixes = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
    ignored = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--", *origin.modules)
    for path in map(Path, _split(git(folder, *ignored) or b"") if origin.modules else ()):
        if path.name.endswith(suffixes) and not any(part in NOT_CODE for part in path.parts):
            yield path


def _split(names: bytes) -> Iterator[str]:
    return (os.fsdecode(name) for name in names.split(b"\0") if name)


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        if is_environment(Path(place)) or _holds_runs(Path(place), root, folder):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_CODE]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]  # os.walk does not follow them
        yield from (Path(place, name).relative_to(folder) for name in (*names, *links) if not name.endswith(".pyc"))


def _copy(folder: Path, files: Iterable[Path], to: Path) -> None:
    """Copy files of a folder, except those that are there already."""
    files = [path for path in files if not os.path.lexists(to / path)]
    for parent in {path.parent for path in files}:
        (to / parent).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        list(pool.map(lambda path: _copy_file(folder / path, to / path), files))


def _copy_file(file: Path, to: Path) -> None:
    """Copy a file with its mode and times, except that only its owner may write the copy. shutil.copy2 would make twice
    as many system calls."""
    with open(file, "rb", buffering=0) as source, open(to, "wb") as copy:
        found = os.fstat(source.fileno())
        shutil.copyfileobj(source, copy)
    os.chmod(to, stat.S_IMODE(found.st_mode) & ~OTHERS_MAY_WRITE)
    os.utime(to, ns=(found.st_atime_ns, found.st_mtime_ns))


def _packages() -> set[str]:
    """NAME==VERSION of each installed package. `Distribution.metadata` would parse all other fields too, which takes
    six times as long."""
    packages = set()
    for distribution in importlib.metadata.distributions():
        text = next(filter(None, map(distribution.read_text, METADATA)), "")
        name, version = NAME.search(text), VERSION.search(text)
        if name and version:  # else it is what a failed installation has left
            packages.add(f"{name[1]}=={version[1]}")
    return packages


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
        return look_up(config, working_folder(run))


def look_up(config: Config, folder: Path) -> CodeOrigin:
    """Find the code of the task, the script or the command that is named in `folder`."""
    words = config.script
    named = script.name_of(words) if words else config.task
    name = named.partition(".")[0]
    is_module = not words or words[0] == script.MODULE
    spec = find_spec(name, [folder]) if is_module and ("." in named or words) else None
    own = [(name, path) for path in _files_of(spec)] if spec else []
    file, repository = _file_of_script(config, folder)
    if file is not None:
        own = [("", file.resolve())]
    elif own:
        repository = _repository(own[0][1], folder)
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


def _file_of_script(config: Config, folder: Path) -> tuple[Path | None, Path | None]:
    """The script's file, and the user's repository. For a command this is the first file among its words that a
    repository has, and without one the repository in which it was typed."""
    files = script.files_of(config.script, folder) if config.script else []
    for file in files:
        if repository := _repository(file.resolve(), folder):
            return file, repository
    if not config.script or config.script[0] == script.MODULE:
        return None, None
    if script.is_python(config.script):
        return files[0], None
    top = git(folder, "rev-parse", "--show-toplevel")
    return None, Path(os.fsdecode(top.rstrip(b"\n"))) if top else None


def script_in(origin: CodeOrigin, run: RunDir, config: Config) -> Path | None:
    """The file of the run's script in the copy of the code, or where it lies if it is not copied; None for a module,
    and for a command without such a file."""
    file, _ = _file_of_script(config, working_folder(run))
    if file is None or origin.repository is None or not file.resolve().is_relative_to(origin.repository):
        return file
    return run.code / file.resolve().relative_to(origin.repository)


def changed_files(run: RunDir, config: Config) -> list[str]:
    """The files of the user's code that differ between the run's copy and the repository now: edited, new or gone."""
    origin = origin_of(run, config)
    if origin.repository is None or not run.code.exists():
        return []
    folder, root = Path(origin.repository), Path(config.launch.root)
    now = {*code_files(folder, root), *_generated(origin)}
    gone = {path for path in map(Path, _walk(run.code, root)) if not (folder / path).exists() and not _is_ours(path)}
    return sorted(str(path) for path in now | gone if _content(folder / path) != _content(run.code / path))


def edited_files(run: RunDir, config: Config, since: float) -> list[str]:
    """The Python files of the user's code that were written after a moment (Unix time), for a run without a copy."""
    origin = origin_of(run, config)
    if origin.repository is None:
        return []
    folder, found = Path(origin.repository), []
    with contextlib.suppress(ConfigError):  # too many files to be code: only a copy needs to know
        for path in {*code_files(folder, Path(config.launch.root)), *_generated(origin)}:
            with contextlib.suppress(OSError):
                if path.suffix == ".py" and (folder / path).stat().st_mtime > since:
                    found.append(str(path))
    return sorted(found)


def _is_ours(path: Path) -> bool:
    """Whether a path in the copy is Laststep's, or may be: a file of its clone, or what the copy says of itself."""
    return (PROJECT / path).exists() or path.parts[0] == PRESENT or path == _file(Path())


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def replace_copy(run: RunDir) -> None:
    """Move the run's copy of the code away, so that the next submission makes another. Raises ConfigError."""
    if run.code.is_symlink():
        raise ConfigError(f"{run.name}: --code new: the runs of a sweep share one copy of the code")
    with contextlib.suppress(FileNotFoundError):
        old = aside(run.code)
        run.code.rename(old)
        shutil.rmtree(old, ignore_errors=True)


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

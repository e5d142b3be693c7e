"""The code copy: every attempt of a job runs the code as it was at submission, even if files are edited meanwhile.

It holds the files of Laststep and of the user's repository (see laststep.code.code_origin): the tracked files and
the untracked ones that git does not ignore. Without git: all files except hidden folders, environments and
caches. The folder `trainer/` of a clone of Laststep is left out: it would hide a `trainer` of the user's, see
laststep.records.former_names.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path

from laststep.code import code_origin
from laststep.code.code_origin import CLONE, NOT_CODE, CodeOrigin, git, is_environment
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.former_names import FORMER, PRESENT
from laststep.rundir import RunDir, aside
from laststep.runs.run_folders import PROJECT, working_folder
from laststep.runs.trust import OTHERS_MAY_WRITE

# One thread copies for COPY_ALONE_S: on a local disk it is faster alone. Then COPY_THREADS copy what is left: on a
# network file system each waits for its file.
COPY_ALONE_S = 0.1
COPY_THREADS = 16
MOST_FILES = 50_000
MOST_MB = 1000  # a larger copy is refused
MUCH_MB = 100  # a larger copy gets a warning
ABANDONED_S = 86_400.0  # no copy takes a day
METADATA = ("METADATA", "PKG-INFO", "")  # in .dist-info; in .egg-info; .egg-info that is a file itself
NAME, VERSION = (re.compile(rf"^{field}: *(\S+)", re.MULTILINE) for field in ("Name", "Version"))


def copy_code(run: RunDir, config: Config) -> None:
    """Copy the code, its uncommitted changes and the list of installed packages into the run's folder.

    Raises ConfigError when that fails, and when there is too much to be code.
    """
    partial = aside(run.code)
    _remove_abandoned(run)
    root = Path(config.launch.root)
    origin = code_origin.look_up(config.task, working_folder(run))
    try:
        ours, theirs = _files_of_laststep(root), list[Path]()
        _check_size(PROJECT, ours)
        if origin.repository is not None:
            folder = Path(origin.repository)
            theirs = list(dict.fromkeys([*_code_files(folder, root), *_generated(origin)]))
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


def _remove_abandoned(run: RunDir) -> None:
    """Remove what a copy that was killed has left, but not one that is being made."""
    for partial in run.path.glob(f"{run.code.name}*.tmp"):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(partial, ignore_errors=True)


def _files_of_laststep(root: Path) -> list[Path]:
    """Laststep's own code files, relative to PROJECT."""
    if CLONE:
        return [path for path in _code_files(CLONE, root) if path.parts[0] != FORMER]
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


def _code_files(folder: Path, root: Path) -> list[Path]:
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

    def copy(path: Path) -> None:
        _copy_file(folder / path, to / path)

    left, deadline = iter(files), time.monotonic() + COPY_ALONE_S
    for path in left:
        copy(path)
        if time.monotonic() > deadline:
            break
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        for _ in pool.map(copy, left):
            pass


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

"""The code copy: every attempt of a job runs the code as it was at submission, even if files are edited meanwhile.

It holds the files of this project and, if the task is defined there, those of the folder where the command was typed:
the tracked files and the untracked ones that git does not ignore. Without git: all files except hidden folders,
environments and caches.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.cluster.run_folders import PROJECT
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.rundir import RunDir

COPY_THREADS = 16  # each waits for the file system
MOST_FILES = 50_000
NOT_CODE = ("__pycache__", "node_modules", "site-packages")
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")  # a folder that holds one of these is a Python environment


def copy_code(run: RunDir, config: Config) -> None:
    """Copy the code, its uncommitted changes and the list of installed packages into the run's folder.

    Raises ConfigError when that fails.
    """
    partial = run.code.with_suffix(".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    root = Path(config.launch.root)
    try:
        for folder in reversed(_folders(config.task)):  # Python searches the first one first, so it is copied last
            _copy(folder, list(_files(folder, root)), partial)
        if (diff := _git(PROJECT, "diff", "HEAD", "--", ".")) is not None:
            run.diff.write_bytes(diff)
        # Once per package: each access reads the metadata again.
        packages = [distribution.metadata for distribution in importlib.metadata.distributions()]
        installed = {f"{package['Name']}=={package['Version']}" for package in packages}
        run.packages.write_text("\n".join(sorted(installed, key=str.lower)) + "\n")
        partial.rename(run.code)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"launch.root={root}: the code could not be copied to {run.code}: {error}") from None


def current_commit() -> str | None:
    """The commit of this project's code; None outside git."""
    found = _git(PROJECT, "rev-parse", "HEAD")
    return found.decode().strip() if found else None


def _folders(task: str) -> list[Path]:
    """The folders of the code that a job needs, in the order in which Python searches them."""
    here = Path.cwd()
    spec = importlib.util.find_spec(task.partition(".")[0]) if "." in task else None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    found_here = any(Path(place).is_relative_to(here) for place in places if place)
    return [PROJECT, here] if found_here and not here.is_relative_to(PROJECT) else [PROJECT]


def _files(folder: Path, root: Path) -> Iterator[Path]:
    """The code files of a folder, relative to it. Raises ConfigError when there are too many files to be code."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if folder == PROJECT and not (PROJECT / "launch.py").exists():  # installed as a package
        found: Iterator[Path] = (Path("trainer") / path for path in _walk(PROJECT / "trainer", root))
    elif listed:
        found = (Path(os.fsdecode(name)) for name in listed.split(b"\0") if name)
    else:
        found = _walk(folder, root)
    for number, path in enumerate(found):
        if number == MOST_FILES:
            raise ConfigError(f"{folder} has over {MOST_FILES} files: submit from a folder that holds only code")
        if (folder / path).is_dir():  # a submodule
            yield from (path / inner for inner in _files(folder / path, root))
        elif (folder / path).exists() and not (folder / path).is_relative_to(root):
            yield path


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        if any(name in names or name in folders for name in ENVIRONMENT_MARKS) or Path(place) == root:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_CODE]
        yield from (Path(place, name).relative_to(folder) for name in names if not name.endswith(".pyc"))


def _copy(folder: Path, files: list[Path], to: Path) -> None:
    for parent in {path.parent for path in files}:
        (to / parent).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        for _ in pool.map(lambda path: shutil.copy2(folder / path, to / path), files):
            pass


def _git(folder: Path, *words: str) -> bytes | None:
    """git's output; None where git is not installed or the folder is not in a repository."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout

"""The code copy: every attempt of a job runs the code as it was at submission, whatever is edited meanwhile.

Copied are this project's files, and those of the folder that the command was typed in where the task is found there:
tracked ones and untracked ones that git does not ignore; without git, all but hidden folders, environments and caches.
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

COPIED_AT_ONCE = 16  # files: each waits for the file system
MOST_FILES = 50_000
NOT_CODE = ("__pycache__", "node_modules", "site-packages")
OF_AN_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")


def keep(run: RunDir, config: Config) -> None:
    """Put the code, what it had beyond its commit, and the list of packages into the run's folder.

    Raises ConfigError when that cannot be.
    """
    aside = run.code.with_suffix(".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    root = Path(config.launch.root)
    try:
        for folder in reversed(_folders(config.task)):  # the first, which Python would look into first, wins
            _copy(folder, list(_files(folder, root)), aside)
        if (diff := _git(PROJECT, "diff", "HEAD", "--", ".")) is not None:
            run.diff.write_bytes(diff)
        # Each time that it is asked for, a distribution's metadata is read anew.
        told = [distribution.metadata for distribution in importlib.metadata.distributions()]
        installed = {f"{one['Name']}=={one['Version']}" for one in told}
        run.packages.write_text("\n".join(sorted(installed, key=str.lower)) + "\n")
        aside.rename(run.code)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ConfigError(f"launch.root={root}: the code could not be copied to {run.code}: {error}") from None


def commit() -> str | None:
    """The commit of this project's code, where git knows of one."""
    found = _git(PROJECT, "rev-parse", "HEAD")
    return found.decode().strip() if found else None


def _folders(task: str) -> list[Path]:
    """Where the code is that a job needs, in the order in which Python looks there."""
    here = Path.cwd()
    spec = importlib.util.find_spec(task.partition(".")[0]) if "." in task else None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    found_here = any(Path(place).is_relative_to(here) for place in places if place)
    return [PROJECT, here] if found_here and not here.is_relative_to(PROJECT) else [PROJECT]


def _files(folder: Path, root: Path) -> Iterator[Path]:
    """The files of a folder that are code, relative to it. Raises ConfigError when they are too many to be."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if folder == PROJECT and not (PROJECT / "launch.py").exists():  # installed as a package
        found: Iterator[Path] = (Path("trainer") / path for path in _walk(PROJECT / "trainer", root))
    elif listed:
        found = (Path(os.fsdecode(name)) for name in listed.split(b"\0") if name)
    else:
        found = _walk(folder, root)
    for number, path in enumerate(found):
        if number == MOST_FILES:
            raise ConfigError(f"{folder} has over {MOST_FILES} files: submit from a folder that holds code alone")
        if (folder / path).is_dir():  # a submodule
            yield from (path / inner for inner in _files(folder / path, root))
        elif (folder / path).exists() and not (folder / path).is_relative_to(root):
            yield path


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        if any(name in names or name in folders for name in OF_AN_ENVIRONMENT) or Path(place) == root:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_CODE]
        yield from (Path(place, name).relative_to(folder) for name in names if not name.endswith(".pyc"))


def _copy(folder: Path, files: list[Path], to: Path) -> None:
    for parent in {path.parent for path in files}:
        (to / parent).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(COPIED_AT_ONCE) as pool:
        for _ in pool.map(lambda path: shutil.copy2(folder / path, to / path), files):
            pass


def _git(folder: Path, *words: str) -> bytes | None:
    """What git prints; None where it is not installed, or the folder is not its."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout

"""The copy of the user's project that the runs of a proof work in, so that they replace none of the user's files.

A script writes next to itself and into the folder where it is started: checkpoint.pth.tar, TensorBoard's folders. So
both are copied, with what git ignores: the script may read it. What is too large to be copied, a data set as a rule, is
linked: there the script sees, and could change, the user's own files. `written` says whether it did.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from laststep.code import code_copy
from laststep.config.config import Config, with_launch
from laststep.records.probes import without_trackers
from laststep.runs.run_folders import PROJECT
from laststep.script import FILE, files_of

MOST_ENTRIES, MOST_BYTES = 10_000, 1 << 30  # of a copy; folders and files beyond that are linked
MOST_WATCHED = 20_000  # files whose size and time are compared
MOST_SIBLINGS = 1000  # of a project's folder, for paths such as ../data
MADE_BY_PYTHON = ("__pycache__", "node_modules")
Seen = dict[str, tuple[int, int, int]]  # size, time and inode of each file


class ProjectCopy:
    """A copy of the project that a configuration's task or script belongs to, and of the current folder."""

    def __init__(self, config: Config, to: Path) -> None:
        """Make the copy in the folder `to`, which exists, in a throwaway folder."""
        runs = Path(os.path.expanduser(config.launch.root)).absolute()
        self._skipped = {runs.resolve(), to.parent.resolve()}
        self._here = Path.cwd()
        origin = code_copy.look_up(config, self._here)
        repository = Path(origin.repository) if origin.repository else self._here
        self._copies: dict[Path, Path] = {}  # each copied folder, and where its copy is
        self.linked: list[str] = []  # what was too large, as the user would write it
        for folder in (repository, self._here):
            if not any(folder.is_relative_to(copied) for copied in self._copies):
                place = to / str(len(self._copies)) / (folder.parent.name or "root") / (folder.name or "root")
                self._copies[folder] = place
                self._copy(folder, place)
        self.folder = self._place(self._here)  # the current folder's
        inside = [self._place(path) for place in origin.python_path if (path := repository / place).is_dir()]
        users = [Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        paths = [PROJECT, *inside, *(self._place(self._here / each) for each in users)]
        self.environment = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, paths))), **without_trackers(to)}
        for file in files_of(config.script, self._here)[:1] if config.script else ():
            self.environment[FILE] = str(self._place(file.resolve()))
        self._watched = [*self._copies, *_named(config, self._here)]
        self._before = self._look()

    @contextlib.contextmanager
    def entered(self, config: Config) -> Iterator[Config]:
        """The copy as the current folder, and the configuration with its environment."""
        os.chdir(self.folder)
        try:
            yield with_launch(config, env={**config.launch.env, **self.environment})
        finally:
            os.chdir(self._here)

    def written(self) -> list[str]:
        """The user's own files that are new, changed or gone since the copy was made, as far as MOST_WATCHED reaches:
        those of the project, and of absolute paths among the script's words."""
        now = self._look()
        return sorted(
            self._shown(name) for name in now.keys() | self._before if now.get(name) != self._before.get(name)
        )

    def _place(self, path: Path) -> Path:
        """Where a path of the user's is in the copy; the path itself if it is not in it."""
        for folder, copy in self._copies.items():
            if path.is_relative_to(folder):
                return copy / path.relative_to(folder)
        return path

    def _copy(self, folder: Path, to: Path) -> None:
        """Copy a folder, level by level, as long as there is room; link what is beyond it, and what lies beside it."""
        to.parent.mkdir(parents=True)
        left, files, known = MOST_ENTRIES, list[tuple[int, Path, Path]](), dict[Path, Path]()
        todo = deque([(folder, to)])
        while todo:
            source, copy = todo.popleft()
            entries, real = _entries(source, left + 1), source.resolve()
            if real in self._skipped:
                continue
            if real in known:  # a link within the project
                copy.symlink_to(known[real])
                continue
            if len(entries) > left:
                self._link(source, copy)
                continue
            known[real] = copy
            left -= len(entries)
            copy.mkdir()
            for entry in entries:
                path, place = source / entry.name, copy / entry.name
                if entry.is_file():
                    files.append((entry.stat().st_size, path, place))
                elif entry.is_dir() and (entry.name == ".git" or code_copy.is_environment(path)):
                    place.symlink_to(path)
                elif entry.is_dir() and entry.name not in MADE_BY_PYTHON:
                    todo.append((path, place))
        room = min(MOST_BYTES, shutil.disk_usage(to).free // 4)
        for size, path, place in sorted(files):
            room -= size
            if room < 0 or not os.access(path, os.R_OK):
                self._link(path, place)
            else:
                shutil.copy2(path, place)
        for sibling in _entries(folder.parent, MOST_SIBLINGS):
            if not os.path.lexists(place := to.parent / sibling.name):
                place.symlink_to(sibling.path)

    def _link(self, path: Path, place: Path) -> None:
        place.symlink_to(path.resolve())
        self.linked.append(self._shown(str(path)))

    def _shown(self, path: str) -> str:
        return os.path.relpath(path, self._here) if Path(path).is_relative_to(self._here) else path

    def _look(self) -> Seen:
        """The user's files that are watched."""
        found, todo, known = Seen(), deque(self._watched), set(self._skipped)
        while todo and len(found) < MOST_WATCHED:
            path = todo.popleft()
            with contextlib.suppress(OSError):
                if not path.is_dir():
                    seen = path.stat()
                    found[str(path)] = seen.st_size, seen.st_mtime_ns, seen.st_ino
                elif path.name not in (*MADE_BY_PYTHON, ".git") and (real := path.resolve()) not in known:
                    known.add(real)
                    if code_copy.is_environment(path):  # more files than are watched, and nobody's work
                        continue
                    todo.extend(Path(entry.path) for entry in _entries(path, MOST_WATCHED))
        return found


def _entries(folder: Path, most: int) -> list[os.DirEntry[str]]:
    """What is in a folder, at most that many; nothing of one that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(itertools.islice(entries, most))
    except OSError:
        return []


def _named(config: Config, here: Path) -> Iterator[Path]:
    """The absolute paths that the script's words and the task's own settings name."""
    words: Iterable[str] = [*config.script[1:], *map(str, config.args.values())]
    for word in words:
        path = Path(os.path.expanduser(word.rpartition("=")[2]))
        if path.is_absolute() and path.parent != path and not here.is_relative_to(path):
            yield path

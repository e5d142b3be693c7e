"""OpaqueFiles: the part of a checkpoint that a framework writes by itself, in a format that only it can read.

For state that cannot be registered: a DeepSpeed engine, Megatron's shards, anything that writes a folder of its own.
One save goes like this:

    1. In the training loop of every rank, `save` hands the framework the folder `opaque` of the unfinished checkpoint.
       All ranks write there together, and may run any collectives.
    2. When every rank is done, the lowest rank of each node lists the folder. A network file system may show a node an
       old list, but never one without that node's own files, so the lists together are complete.
    3. From the lists all ranks compute the same shares: each file is hashed by a rank on a node that has seen it, about
       as many bytes by each.
    4. The files are ordinary files of the checkpoint from then on: the writer's threads hash and fsync them while
       training continues, and rank 0 commits them with the rest, see `laststep.checkpoint.writer`.

What the framework's own code raises ends the attempt: nobody knows what its ranks would do next. The checkpoint is then
never committed.

The ranks communicate through their key-value store, with these keys under "opaque/", where <n> counts the saves:

    <n>/saved/<rank>    there once the framework's code has returned on that rank
    <n>/list/<rank>     what the lowest rank of a node has found: a `_Listing` as JSON
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from laststep.checkpoint.files import FileEntry, hash_files
from laststep.checkpoint.store import OPAQUE
from laststep.config.errors import ConfigError
from laststep.ranks.group import Group
from laststep.ranks.meeting import with_prefix
from laststep.rundir import fsync

LOOK_S = 2.0  # between two looks at what a framework has written so far
LONGEST_POLL_S = 0.1  # between two looks at the key-value store
MISSING_S = 1.0  # after this rank 0 looks which ranks are missing, and whether they live


class _Listing(TypedDict):
    """Files with their sizes, by their names in the checkpoint, or why they cannot be kept."""

    files: dict[str, int]
    error: str | None


@dataclass(frozen=True)
class Share:
    """The framework's files that this rank hashes."""

    names: Sequence[str]
    active: Callable[[], None]  # called after each read

    def entries(self, writing: Path, check: Callable[[], None]) -> dict[str, FileEntry]:
        """Their entries in the manifest, once they would survive a power cut. What `check`, which is called after each
        read, raises ends the work. Raises OSError."""

        def after_read() -> None:
            check()
            self.active()

        entries = hash_files(writing, self.names, after_read)
        for folder in {parent for name in self.names for parent in Path(name).parents}:
            fsync(writing / folder)
        return entries


class OpaqueFiles:
    """Has a framework write its files into each checkpoint. All ranks call `save` together."""

    def __init__(
        self,
        write: Callable[[Path], object],
        group: Group,
        check_alive: Callable[[list[int]], None],
        active: Callable[[], None],
    ) -> None:
        """`write` is the framework's code, which writes into a folder. `check_alive` raises PeerLost if one of these
        ranks, for which rank 0 waits, is dead. `active` is called whenever the work advances."""
        self._write, self._check_alive, self._active = write, check_alive, active
        self._rank, self._hosts = group.world.rank, group.world.hosts
        self._keys = with_prefix(OPAQUE, group.store)
        self._number = 0

    def save(self, writing: Path) -> Share:
        """Have the framework write into the folder of an unfinished checkpoint; returns what this rank is to hash.

        Raises ConfigError, the same on every rank, if what it wrote cannot be kept; OSError; what the framework raises.
        """
        self._number += 1
        folder = (writing / OPAQUE).absolute()
        folder.mkdir(exist_ok=True)
        with reporting_growth(folder, self._active) if self._rank == 0 else contextlib.nullcontext():
            self._write(folder)
            return Share(self._own_share(folder), self._active)

    def _own_share(self, folder: Path) -> list[str]:
        """What this rank is to hash of what all ranks have written."""
        number, leaders = self._number, lowest_ranks(self._hosts)
        self._keys.set(f"{number}/saved/{self._rank}", "")
        self._keys.delete_key(f"{number - 1}/saved/{self._rank}")
        if self._rank in leaders:
            self._await(f"{number}/saved", range(len(self._hosts)))
            self._keys.set(f"{number}/list/{self._rank}", json.dumps(_listing(folder)))
            self._keys.delete_key(f"{number - 1}/list/{self._rank}")
        lists: list[_Listing] = [json.loads(text) for text in self._await(f"{number}/list", leaders)]
        return _shares(lists, leaders, self._hosts)[self._rank]

    def _await(self, name: str, ranks: Iterable[int]) -> list[bytes]:
        """The values of the keys of these ranks, as soon as all have one. Raises PeerLost."""
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        began = look = time.monotonic()
        while not self._keys.check(list(keys.values())):
            now = time.monotonic()
            if self._rank == 0 and now - look > MISSING_S:
                self._check_alive([rank for rank, key in keys.items() if not self._keys.check([key])])
                look = time.monotonic()
            time.sleep(min(LONGEST_POLL_S, 0.002 + (now - began) / 5))
        return self._keys.multi_get(list(keys.values()))


@contextlib.contextmanager
def reporting_growth(folder: Path, grown: Callable[[], None]) -> Iterator[None]:
    """Meanwhile, call `grown` each time that there is more in a folder, or something newer.

    A framework may write for longer than any timeout. What it writes shows that it is not stuck.
    """
    over = threading.Event()

    def look() -> None:
        before, wait_s = None, LOOK_S
        while not over.wait(wait_s):
            began = time.monotonic()
            with contextlib.suppress(OSError):  # files come and go
                if (now := _size_and_age(folder)) != before:
                    before = now
                    grown()
            wait_s = max(LOOK_S, 10 * (time.monotonic() - began))  # a folder of many files on a slow disk

    threading.Thread(target=look, name="growth", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def lowest_ranks(hosts: Sequence[str]) -> list[int]:
    """The lowest rank on each host."""
    return [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]


def _shares(lists: Sequence[_Listing], leaders: Sequence[int], hosts: Sequence[str]) -> list[list[str]]:
    """What each rank is to hash: a file that a node has seen, its ranks can read. Raises ConfigError."""
    found = {name: size for each in lists for name, size in each["files"].items()}
    error = next((each["error"] for each in lists if each["error"] is not None), None)
    if error is None and not found:
        error = "run.checkpoint(): save(folder) has written nothing into its folder"
    if error is not None:
        raise ConfigError(error)
    shares: list[list[str]] = [[] for _ in hosts]
    loads = [(0, rank) for rank in range(len(hosts))]  # a heap
    for name in sorted(found, key=lambda name: (-found[name], name)):
        seen_on = {hosts[leader] for leader, each in zip(leaders, lists) if name in each["files"]}
        others = []
        while hosts[loads[0][1]] not in seen_on:
            others.append(heapq.heappop(loads))
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + found[name], rank))
        for other in others:
            heapq.heappush(loads, other)
        shares[rank].append(name)
    return shares


def _listing(folder: Path) -> _Listing:
    """The files in a folder and its subfolders. Raises OSError."""
    try:
        return {"files": {f"{OPAQUE}/{path.relative_to(folder)}": size for path, size in _files(folder)}, "error": None}
    except ConfigError as error:
        return {"files": {}, "error": str(error)}


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files in a folder and its subfolders, with their sizes. Raises OSError, and ConfigError for anything else."""
    for path in _entries(folder):
        try:
            kind = path.lstat().st_mode
            if stat.S_ISDIR(kind):
                continue
            if stat.S_ISLNK(kind) and not _stays_within(path, folder):
                kept = "a relative link to a file in the folder"
                raise ConfigError(f"{_place(path, folder)} is a link to {os.readlink(path)!r}; only {kept} can be kept")
            found = path.stat()
        except FileNotFoundError:  # an old list has it
            continue
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{_place(path, folder)} is neither a file nor a folder, and cannot be kept")
        yield path, found.st_size


def _entries(folder: Path) -> Iterator[Path]:
    """Everything in a folder and its subfolders. Raises OSError."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))


def _stays_within(link: Path, folder: Path) -> bool:
    """Whether a link leads to a file in the folder, even after the folder has been renamed."""
    return not os.path.isabs(os.readlink(link)) and link.resolve().is_relative_to(folder.resolve()) and link.is_file()


def _place(path: Path, folder: Path) -> str:
    return f"run.checkpoint(): save(folder) has written {str(path.relative_to(folder))!r}, which"


def _size_and_age(folder: Path) -> tuple[int, int, int]:
    """The number of files in a folder, their size, and when the newest was written."""
    found = [path.lstat() for path in _entries(folder)]
    return len(found), sum(each.st_size for each in found), max((each.st_mtime_ns for each in found), default=0)

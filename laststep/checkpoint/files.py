"""The files of a checkpoint: into how many a state is cut, how they are read, hashed and compared with the manifest,
and how long a disk that refuses is tried again. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, TypedDict, TypeVar

from laststep.config.errors import CheckpointError as CheckpointError
from laststep.ranks import disk
from laststep.ranks.process import start_thread

READING_THREADS = 4  # that share the loading of a state: the first access to new memory takes most of the time
HASHING_THREADS = 4  # files that are hashed at the same time: a SHA-256 is computed from front to back
# Bytes per read of a file that is hashed. Past the page cache nothing reads ahead, so small reads are slow.
READ_BYTES = 16 << 20
POLL_S = 0.005
# What a disk says when it has lost bytes, the last two past the page cache (blk_errors in block/blk-core.c of Linux).
# Any other error may be of the way to them: a mount, a server, a permission.
BYTES_ARE_LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ)
# One stripe for each of these, at most one per rank: more files would cost more than they gain.
STRIPE_BYTES = 64 << 20
# A rank's stripe is cut into up to FILES_PER_RANK files of at least this size: a SHA-256 is computed from
# front to back, so one file is hashed by one core, in a save and in a restore. More than MOST_FILES in one folder would
# cost a metadata server more than that gains.
FILE_BYTES = 64 << 20
FILES_PER_RANK = 4
MOST_FILES = 4096
ALIGNMENT = 64  # bytes: a cache line, and a multiple of the size of every dtype
# What goes past the page cache begins and ends at multiples of this in the file, and should in memory: a disk may
# refuse anything else.
BLOCK = max(4096, mmap.PAGESIZE)

Result = TypeVar("Result")


class CheckpointMissing(CheckpointError):
    """A file of a checkpoint is missing, or this host still believes so: a client of a network disk that has looked
    before the file was there remembers for seconds that it is not."""


class CheckpointUnreadable(CheckpointError):
    """A file of a checkpoint cannot be read, perhaps only now or only on this host. `is_damaged` says whether the disk
    claims to have lost it; a passing error of a network file system may look the same."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(f"{name} cannot be read: {error.strerror or error}")
        self.is_damaged = error.errno in BYTES_ARE_LOST


class Patience(disk.Patience):
    """Waits for a file of a checkpoint that cannot be read, too."""

    passing: ClassVar[tuple[type[Exception], ...]] = (OSError, CheckpointUnreadable)


NO_PATIENCE = Patience(0.0, lambda text: None)


class StateChanged(RuntimeError):
    """The device has continued, and changed the state that was frozen."""


class FileEntry(TypedDict):
    """What the manifest records about one file of a checkpoint."""

    bytes: int
    sha256: str


def verify_files(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Read these files and compare them with their hashes. Raises CheckpointError."""
    for error in damaged_files(folder, entries).values():
        raise error


def damaged_files(
    folder: Path, entries: Mapping[str, FileEntry], advance: Callable[[], None] = lambda: None
) -> dict[str, CheckpointError]:
    """Read these files and compare them with their hashes; returns why a file is not as it should be, by its name.
    Calls `advance` like `read_files`."""
    return _side_by_side({name: partial(_verify, folder, name, entry, advance) for name, entry in entries.items()})


def hash_files(folder: Path, names: Iterable[str], after_read: Callable[[], None]) -> dict[str, FileEntry]:
    """The manifest's entries of files that are already written, each of them read and fsynced. What `after_read`, which
    follows each read, raises ends the work. Raises OSError."""
    names = list(names)
    hashed = at_once([partial(_hash, folder / name, after_read, sync=True) for name in names], HASHING_THREADS)
    return dict(zip(names, hashed))


def read_files(
    folder: Path, entries: Mapping[str, FileEntry], memory: Mapping[str, memoryview], advance: Callable[[], None]
) -> dict[str, CheckpointError]:
    """`damaged_files`, but each file is read into its part of `memory`, which is as long as its entry says."""
    return _side_by_side(
        {name: partial(_verify, folder, name, entry, advance, memory[name]) for name, entry in entries.items()}
    )


def write_hashed(path: Path, chunks: Iterable[memoryview], sync_bytes: int | None = None) -> FileEntry:
    """Write and sync a new file; returns its entry in the manifest. A chunk is read until the next one is asked for.

    The disk has each chunk, or begins with it, before the next one is asked for, so the sync at the end has little left
    to wait for. With `sync_bytes` the file is synced each time that about this much is written, so that no sync takes
    long, and a thread of its own hashes it: the single file of a rank that others wait for. Raises OSError.
    """
    digest, size, synced = hashlib.sha256(), 0, 0
    with _own_file(path, "xb") as file:
        access = _Uncached(file)

        def write_some(part: memoryview) -> int:
            if not (count := os.write(file.fileno(), part)):
                raise OSError(errno.EIO, "the disk takes no byte")
            return count

        def write(chunk: memoryview) -> None:
            done = 0
            while done < len(chunk):
                done += access.do(write_some, chunk[done:], size + done)
            # Of pages that are not on the disk yet this says: begin (man 2 posix_fadvise, under Linux).
            _advise(file, size, len(chunk), "POSIX_FADV_DONTNEED")

        for chunk in chunks:
            if sync_bytes is None:
                digest.update(chunk)
                write(chunk)
            else:
                at_once([partial(write, chunk), partial(digest.update, chunk)])
            size += len(chunk)
            if sync_bytes is not None and size - synced >= sync_bytes:
                os.fsync(file.fileno())
                synced = size
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def files_sha256(entries: Mapping[str, FileEntry]) -> str:
    """One SHA-256 for several files: over the name, size and SHA-256 of each, in name order."""
    lines = (f"{name!a} {entries[name]['bytes']} {entries[name]['sha256']}\n" for name in sorted(entries))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def reading_steps(entries: Mapping[str, FileEntry]) -> int:
    """How often `read_files` and `damaged_files` call `advance` for these files."""
    return sum(-(-entry["bytes"] // READ_BYTES) for entry in entries.values())


@contextlib.contextmanager
def disk_errors_explained(name: str) -> Iterator[None]:
    """Raise CheckpointError, which names the file, for any error of the disk while it is read."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointMissing(f"{name} is missing") from None
    except OSError as error:
        raise CheckpointUnreadable(name, error) from error


def _verify(
    folder: Path, name: str, entry: FileEntry, advance: Callable[[], None], memory: memoryview | None = None
) -> None:
    with disk_errors_explained(name):
        if (size := (folder / name).stat().st_size) != entry["bytes"]:
            raise CheckpointError(f"{name} has {size} bytes, its manifest says {entry['bytes']}")
        found = _hash(folder / name, advance, memory=memory)
    if found["bytes"] != entry["bytes"]:
        raise CheckpointError(f"{name} was truncated while it was read")
    _check(name, entry, found["sha256"])


def _hash(
    path: Path, after_read: Callable[[], None], sync: bool = False, memory: memoryview | None = None
) -> FileEntry:
    """Read a file from front to back. With `memory`, which must be a `HostMemory`'s, it is read into that, past the
    page cache; without, through the page cache, and the kernel reads ahead while a piece is hashed."""
    digest, size = hashlib.sha256(), 0
    with _own_file(path, "rb") as file:
        _advise(file, 0, 0, "POSIX_FADV_SEQUENTIAL")
        buffer = memoryview(bytearray(READ_BYTES if memory is None else 0))
        access = _Uncached(file, direct=memory is not None)

        def read_some(part: memoryview) -> int:
            return os.preadv(file.fileno(), [part], size + count)

        while True:
            piece, count = buffer if memory is None else memory[size : size + READ_BYTES], 0
            while count < len(piece) and (found := access.do(read_some, piece[count:], size + count)):
                count += found
            if not count:
                break
            digest.update(piece[:count])
            size += count
            after_read()
        if sync:
            os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


_opened = set[FileIO]()  # by this process, for as long as `_own_file` has them open


@contextlib.contextmanager
def _own_file(path: Path, mode: Literal["rb", "xb"]) -> Iterator[FileIO]:
    """Open a file that no process forked meanwhile keeps open: a loader's worker would hold the room of a checkpoint
    that has been deleted for as long as it lives."""
    with path.open(mode, buffering=0) as file:
        _opened.add(file)
        try:
            yield file
        finally:
            _opened.discard(file)


def _close_copies() -> None:
    for file in _opened:
        with contextlib.suppress(OSError):
            file.close()
    _opened.clear()


os.register_at_fork(after_in_child=_close_copies)


class _Uncached:
    """Reads and writes of a file, past the page cache (O_DIRECT, man 2 open) as far as its file system takes that for
    an open file.

    The copies that the page cache makes cost the processor about as much as the hash, and push out the data that the
    training reads again. Memory that is read into must be hidden from forked processes, as a `HostMemory` is: a fork
    meanwhile could leave it without the bytes (there, under Notes).
    """

    def __init__(self, file: FileIO, direct: bool = True) -> None:
        self._file, self._flag = file, getattr(os, "O_DIRECT", 0) if direct else 0
        self._flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        self._set = 0

    def do(self, call: Callable[[memoryview], int], piece: memoryview, offset: int) -> int:
        """Have `call` read or write as much of a piece as possible, which comes at this offset; returns how much that
        was. Raises OSError."""
        if (whole := len(piece) // BLOCK * BLOCK) and offset % BLOCK == 0 and self._switch(self._flag):
            try:
                return call(piece[:whole])
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT):
                    raise
                # Other blocks than these, memory that begins within one or is a driver's own, or only the page cache.
                self._flag = 0
        self._switch(0)
        return call(piece)

    def _switch(self, flag: int) -> int:
        """Have the next calls go past the page cache, or not; returns whether they do."""
        if flag != self._set:
            try:
                fcntl.fcntl(self._file.fileno(), fcntl.F_SETFL, self._flags | flag)
                self._set = flag
            except OSError:  # this file system has only the page cache
                self._flag = 0
        return self._set


def _advise(file: FileIO, start: int, count: int, advice: str) -> None:
    """Tell the kernel what will become of these bytes of a file; not every system listens."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), start, count, getattr(os, advice))


def _check(name: str, entry: FileEntry, sha256: str) -> None:
    if sha256 != entry["sha256"]:
        raise CheckpointError(f"{name} differs from its SHA-256 in the manifest")


def _side_by_side(work: Mapping[str, Callable[[], None]]) -> dict[str, CheckpointError]:
    """Check files in up to HASHING_THREADS threads; returns why some are damaged or cannot be read, by their names.
    Raises what says nothing about a file: no other file is begun after that.

    The threads are daemons: Python would wait for those of a pool before it ends, and a read may hang.
    """
    left, errors, failed = iter(work.items()), dict[str, CheckpointError](), list[BaseException]()

    def check() -> None:
        for name, one in left:  # the threads share one iterator: each takes the next file
            if failed:
                return
            try:
                one()
            except CheckpointError as error:
                errors[name] = error
                for each in (error, error.__cause__, error.__context__):
                    if each is not None:
                        each.__traceback__ = None  # its frames would keep the file's memory
            except BaseException as error:
                failed.append(error)

    threads = [start_thread("reader", check) for _ in range(min(HASHING_THREADS, len(work)))]
    # Not in C: the watchdog names the line of ours that a rank is stuck in.
    while any(thread.is_alive() for thread in threads):
        time.sleep(POLL_S)
    if failed:
        raise failed[0]
    return {name: errors[name] for name in work if name in errors}


class Stripe(NamedTuple):
    """One of `of` equal parts of a run of bytes. A stripe that is cut again covers the same bytes as its parts."""

    number: int  # from 0
    of: int

    def bounds(self, count: int) -> tuple[int, int]:
        """Where it begins and ends in `count` bytes, both multiples of ALIGNMENT as `count` is."""
        begin, end = (count * number // self.of // ALIGNMENT * ALIGNMENT for number in (self.number, self.number + 1))
        return begin, end


def stripe_count(count: int, ranks: int) -> int:
    """Into how many stripes to cut `count` bytes that this many ranks can write."""
    return max(1, min(ranks, -(-count // STRIPE_BYTES)))


def file_count(count: int, ranks: int, shards: int = 1) -> int:
    """Into how many files a save cuts the `count` bytes of one of `shards`, which this many ranks can write."""
    stripes = stripe_count(count, ranks)
    return stripes * max(1, min(FILES_PER_RANK, count // stripes // FILE_BYTES, MOST_FILES // (stripes * shards)))


def own_files(count: int, rank: int, ranks: int, shards: int = 1) -> list[Stripe]:
    """What a rank writes when all ranks save together, file by file. Where there are fewer stripes than ranks, the
    ranks that write are far apart, so on different nodes; rank 0 is always one of them."""
    stripes, files = stripe_count(count, ranks), file_count(count, ranks, shards)
    number, each = -(-rank * stripes // ranks), files // stripes
    if number >= stripes or number * ranks // stripes != rank:
        return []
    return [Stripe(number * each + part, files) for part in range(each)]


def at_once(work: Sequence[Callable[[], Result]], threads: int | None = None) -> list[Result]:
    """Do these at the same time, in this thread and others, `threads` in all or one for each. All have ended when this
    returns, or raises what the first of them raised that failed.

    The threads are daemons: Python would wait for those of a pool before it ends, and a write may hang.
    """
    left, results, errors = iter(list(enumerate(work))), dict[int, Result](), dict[int, BaseException]()

    def do() -> None:
        for number, one in left:  # the threads share one iterator: each takes the next one
            try:
                results[number] = one()
            except BaseException as error:
                errors[number] = error

    others: list[threading.Thread] = []
    # Without more threads, because the kernel has none or the interpreter is ending, those that there are do it all.
    with contextlib.suppress(RuntimeError):
        for _ in range(min(len(work), threads or len(work)) - 1):
            thread = threading.Thread(target=do, name=threading.current_thread().name, daemon=True)
            thread.start()
            others.append(thread)
    do()
    for thread in others:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(work))]

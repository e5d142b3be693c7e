"""Files of a checkpoint, written and read past the page cache where that is possible, and hashed meanwhile.

The processor copies bytes into the page cache hardly faster than a good disk takes them; there they push out the data
that the training reads, and a sync waits for all of them. Direct I/O (man 2 open, O_DIRECT) leaves the work to the
disk, so the processor hashes at the same time. It needs aligned memory, places and sizes, and not every file system has
it: what does not fit, or is refused, goes through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

BLOCK = 4096  # bytes: a multiple of what file systems ask for
DIRECT_BYTES = 1 << 20  # less gains nothing
O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux


def write_hashed(path: Path, chunks: Iterable[memoryview], sync_bytes: int | None = None) -> tuple[int, str]:
    """Write and sync a new file; returns its size and SHA-256. A chunk is read until the next one is asked for. With
    `sync_bytes` it is synced each time that about so much is written, so that no sync takes long, and remains in the
    page cache: a rescue is read again soon. Raises OSError."""
    digest, size, synced = hashlib.sha256(), 0, 0
    with ExitStack() as ends:
        file = ends.enter_context(path.open("xb", buffering=0))
        output = _Output(file, direct=sync_bytes is None)
        pool: ThreadPoolExecutor | None = None
        for chunk in chunks:
            if pool is None and len(chunk) >= DIRECT_BYTES:
                pool = ends.enter_context(ThreadPoolExecutor(1, "hash"))
            with _beside(pool, digest.update, chunk):
                output.write(chunk, size)
            size += len(chunk)
            if sync_bytes is not None and size - synced >= sync_bytes:
                os.fsync(file.fileno())
                synced = size
        os.fsync(file.fileno())
    return size, digest.hexdigest()


@contextmanager
def _beside(pool: ThreadPoolExecutor | None, work: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Have a thread of the pool do this work during the block; without a pool it is done after the block."""
    done: Future[object] | None = None
    if pool is not None:
        with suppress(RuntimeError):  # the interpreter is ending, and starts no thread
            done = pool.submit(work, value)
    yield  # if it raises, the pool's end waits for the thread
    if done is None:
        work(value)
    else:
        done.result()


class _Output:
    """A new file that is written from front to back."""

    def __init__(self, file: FileIO, direct: bool) -> None:
        self._file, self._descriptor = file, file.fileno()
        self._flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        self._direct, self._refused = False, not (O_DIRECT and direct)

    def write(self, chunk: memoryview, offset: int) -> None:
        """Write a chunk, which comes at this offset. Raises OSError."""
        whole = len(chunk) // BLOCK * BLOCK
        if whole >= DIRECT_BYTES and offset % BLOCK == 0 and _is_aligned(chunk):
            done = 0
            while done < whole and self._switch(True):
                try:
                    done += os.write(self._descriptor, chunk[done:whole])
                except OSError:  # of any kind: the page cache is asked, and what that says counts
                    self._refused = True
                self._refused |= done % BLOCK != 0  # it was cut short, perhaps as the disk is full
            chunk = chunk[done:]
        self._switch(False)
        while chunk:
            chunk = chunk[os.write(self._descriptor, chunk) :]

    def _switch(self, direct: bool) -> bool:
        """Have the next writes be direct, or not; returns whether they are."""
        direct = direct and not self._refused
        if direct != self._direct:
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags | (O_DIRECT if direct else 0))
            except OSError:
                if not direct:
                    raise
                self._refused, direct = True, False
            self._direct = direct
        return direct


class Input:
    """A file that several threads read. A `with` block closes it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size
        self._direct: int | None = None
        if O_DIRECT and hasattr(os, "RWF_NOWAIT") and self.size >= DIRECT_BYTES:
            with suppress(OSError):  # then the page cache does
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)

    def __enter__(self) -> Input:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if self._direct is not None:
            os.close(self._direct)

    def fill(self, start: int, piece: memoryview) -> memoryview:
        """Fill a piece of memory from the file, from byte `start`. Raises OSError."""
        done, whole = 0, len(piece) // BLOCK * BLOCK
        if self._direct is not None and whole and start % BLOCK == 0 and _is_aligned(piece):
            with suppress(OSError):  # the page cache is asked, and what that says counts
                with suppress(BlockingIOError):  # it has nothing of this
                    done = os.preadv(self._file.fileno(), [piece], start, os.RWF_NOWAIT)
                while done < whole and done % BLOCK == 0:
                    if not (count := os.preadv(self._direct, [piece[done:whole]], start + done)):
                        break
                    done += count
        while done < len(piece):
            count = os.preadv(self._file.fileno(), [piece[done:]], start + done)
            if not count:
                raise OSError(errno.EIO, "it was truncated meanwhile")
            done += count
        return piece


def _is_aligned(chunk: memoryview) -> bool:
    """Whether this memory begins at a multiple of BLOCK."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(chunk)) % BLOCK == 0
    except (TypeError, ValueError):  # it may not be written to, or is empty
        return False

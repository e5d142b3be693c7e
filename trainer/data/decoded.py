"""Images that are decoded once per node: whichever rank or worker comes first leaves the pixels for all.

They lie in a file of TMPDIR that has lost its name by the time it is used: in memory as long as there is room, else on
the node's disk, and gone with the last of the ranks, however they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import numpy.typing

from trainer.say import say
from trainer.world.group import Group

Pixels = numpy.typing.NDArray[numpy.uint8]  # (height, width, 3)
SPARE = 0.1  # of the disk, which is left to others
_ENTRY = struct.Struct("<QIIII")  # where the pixels begin, height, width, EXIF orientation; a checksum of these


class Whole(NamedTuple):
    """A decoded image."""

    height: int
    width: int
    orientation: int  # as EXIF has it
    rows: Callable[[int, int], Pixels]  # from one on, so many


class Decoded:
    """The decoded images of a data set of `count`. Until it is shared, it has none and takes none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._file: int | None = None  # an open file, which loader workers inherit

    def share(self, group: Group, name: str) -> None:
        """One file for all ranks of the node. All ranks call it together, with a name that no other data set has."""
        path = ""
        with contextlib.ExitStack() as closing:
            with contextlib.suppress(OSError):  # no room, no folder: then each image is decoded each time
                new = tempfile.TemporaryDirectory(prefix="laststep-", ignore_cleanup_errors=True)
                self._file = _made(Path(closing.enter_context(new)) / "decoded", _ENTRY.size * self._count + 1)
                path = f"{new.name}/decoded"
            key = f"decoded/{name}/{group.world.node}"
            if group.world.local_rank == 0:
                group.store.set(key, path)
            with contextlib.suppress(OSError):  # in containers of their own the ranks of a node share nothing
                shared = os.open(group.store.get(key), os.O_RDWR)
                if self._file is not None:
                    os.close(self._file)
                self._file = shared
            group.barrier(timeout_s=3600)

    def find(self, index: int) -> Whole | None:
        """That image, if anyone has kept it."""
        if self._file is None:
            return None
        start, height, width, orientation, check = _ENTRY.unpack(os.pread(self._file, _ENTRY.size, _ENTRY.size * index))
        if check != _check(start, height, width, orientation):  # nothing is written there, or a part so far
            return None
        return Whole(height, width, orientation, partial(self._rows, start, width))

    def keep(self, index: int, pixels: Pixels, orientation: int) -> Whole:
        """Leave that image for whoever wants it next, if there is room."""
        height, width, _ = pixels.shape
        if self._file is not None:
            with contextlib.suppress(OSError):  # full all the same: it is decoded again next time
                start = self._room(pixels.nbytes)
                if start is not None and os.pwrite(self._file, pixels.data, start) == pixels.nbytes:
                    about = start, height, width, orientation
                    os.pwrite(self._file, _ENTRY.pack(*about, _check(*about)), _ENTRY.size * index)
        return Whole(height, width, orientation, lambda top, count: pixels[top : top + count])

    def _rows(self, start: int, width: int, top: int, count: int) -> Pixels:
        assert self._file is not None
        rows = numpy.empty((count, width, 3), dtype=numpy.uint8)
        if os.preadv(self._file, [rows.data], start + top * width * 3) != rows.nbytes:
            raise OSError("the file of decoded images is shorter than it was")
        return rows

    def _room(self, count: int) -> int | None:
        """Where so many bytes may be written, by nobody else. None where there is no room for them."""
        assert self._file is not None
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # of this process, be it one that was forked
        try:
            disk, start = os.fstatvfs(self._file), os.fstat(self._file).st_size
            if disk.f_bavail * disk.f_frsize - count < SPARE * disk.f_blocks * disk.f_frsize:
                self._tell_once()
                return None
            os.ftruncate(self._file, start + count)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return start

    def _tell_once(self) -> None:
        """That there is no more room: one line for all ranks and workers of the node."""
        assert self._file is not None
        told = _ENTRY.size * self._count  # a byte after the entries
        if os.pread(self._file, 1, told) == b"\0":
            os.pwrite(self._file, b"1", told)
            say(f"WARNING: {tempfile.gettempdir()} has no room for more decoded images: the rest is decoded each time")


def _made(path: Path, size: int) -> int:
    """A new file of so many zeros, open."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def _check(*place: int) -> int:
    return zlib.crc32(repr(place).encode())

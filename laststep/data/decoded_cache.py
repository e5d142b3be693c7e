"""DecodedCache: image files are decoded once per node, and all ranks and workers of the node share the pixels.

They are in a file in TMPDIR that is unlinked before it is used. The page cache keeps it in memory as long as there is
room, otherwise it is on the node's disk; either way it disappears with the last rank, however the ranks end.
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

from laststep.ranks.group import Group
from laststep.say import say

Pixels = numpy.typing.NDArray[numpy.uint8]  # (height, width, 3)
# The cache leaves this much of the disk free for others: a share of a small disk, a fixed amount of a large one, which
# would otherwise stay without a cache while hundreds of gigabytes are free.
SPARE_SHARE, SPARE_BYTES = 0.1, 4 << 30
# The table at the start of the file has an entry per image: the offset of its pixels, height, width and EXIF
# orientation, and a checksum of these four, which distinguishes a complete entry from an empty or half-written one.
_ENTRY = struct.Struct("<QIIII")


class DecodedImage(NamedTuple):
    """A decoded image, of which any rows can be read."""

    height: int
    width: int
    orientation: int  # the value of its EXIF tag
    rows: Callable[[int, int], Pixels]  # rows(first, count)


class DecodedCache:
    """The decoded images of a data set of `count` images. It stays empty until `open_shared` is called."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._file: int | None = None  # a file descriptor, which loader workers inherit

    def open_shared(self, group: Group, name: str) -> None:
        """Open one file for all ranks of the node. All ranks call this together, with a name unique to the data set.

        Without room, or without TMPDIR, there is no file, and images are decoded each time.
        """
        path = ""
        with contextlib.ExitStack() as closing:
            with contextlib.suppress(OSError):
                new = tempfile.TemporaryDirectory(prefix="laststep-", ignore_cleanup_errors=True)
                self._file = _create_file(Path(closing.enter_context(new)) / "decoded", _ENTRY.size * self._count + 1)
                path = f"{new.name}/decoded"
            key = f"decoded/{name}/{group.world.node}"
            if group.world.local_rank == 0:
                group.store.set(key, path)
            with contextlib.suppress(OSError):  # ranks in separate containers share no TMPDIR: each keeps its own file
                shared = os.open(group.store.get(key), os.O_RDWR)
                if self._file is not None:
                    os.close(self._file)
                self._file = shared
            group.barrier(timeout_s=3600)

    def get(self, index: int) -> DecodedImage | None:
        """The image at `index` of the data set, or None if it is not in the cache."""
        if self._file is None:
            return None
        start, height, width, orientation, check = _ENTRY.unpack(os.pread(self._file, _ENTRY.size, _ENTRY.size * index))
        if check != _checksum(start, height, width, orientation):
            return None
        return DecodedImage(height, width, orientation, partial(self._read_rows, start, width))

    def put(self, index: int, pixels: Pixels, orientation: int) -> DecodedImage:
        """Add an image if there is room. Returns it either way."""
        height, width, _ = pixels.shape
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full after all: the image is decoded again next time
                start = self._reserve(pixels.nbytes)
                if start is not None and os.pwrite(self._file, pixels.data, start) == pixels.nbytes:
                    fields = start, height, width, orientation
                    os.pwrite(self._file, _ENTRY.pack(*fields, _checksum(*fields)), _ENTRY.size * index)
        return DecodedImage(height, width, orientation, lambda first, count: pixels[first : first + count])

    def _read_rows(self, start: int, width: int, first: int, count: int) -> Pixels:
        assert self._file is not None
        rows = numpy.empty((count, width, 3), dtype=numpy.uint8)
        if os.preadv(self._file, [rows.data], start + first * width * 3) != rows.nbytes:
            raise OSError("the cache of decoded images is truncated")
        return rows

    def _reserve(self, count: int) -> int | None:
        """The offset of `count` bytes of the file that are now this process's alone, or None if there is no room."""
        assert self._file is not None
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # held per process, so a forked worker gets its own
        try:
            disk, start = os.fstatvfs(self._file), os.fstat(self._file).st_size
            spare = min(SPARE_BYTES, SPARE_SHARE * disk.f_blocks * disk.f_frsize)
            if disk.f_bavail * disk.f_frsize - count < spare:
                self._warn_once()
                return None
            os.ftruncate(self._file, start + count)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return start

    def _warn_once(self) -> None:
        """Print one warning for all ranks and workers of the node that there is no more room."""
        assert self._file is not None
        flag = _ENTRY.size * self._count  # the byte after the table says whether it has been printed
        if os.pread(self._file, 1, flag) == b"\0":
            os.pwrite(self._file, b"1", flag)
            say(f"WARNING: {tempfile.gettempdir()} has no room for more decoded images: the rest is decoded each time")


def _create_file(path: Path, size: int) -> int:
    """The descriptor of a new file of `size` zero bytes."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def _checksum(*fields: int) -> int:
    return zlib.crc32(repr(fields).encode())

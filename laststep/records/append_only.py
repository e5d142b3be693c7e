"""Files of whole lines: a line is appended completely or not at all, and every node can read it at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from laststep.rundir import aside, fsync

_TO_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def append(path: Path, data: bytes) -> None:
    """Append to a file, see `write`. Raises OSError."""
    file = open_file(path)
    try:
        write(file, data)
    finally:
        os.close(file)


def append_line(path: Path, line: str) -> None:
    """Append a line of text, see `write`. It begins behind a line end, also where an older version, or a node that lost
    its power, has left half a line. Raises OSError."""
    file = open_file(path)
    try:
        end = os.lseek(file, 0, os.SEEK_END)
        torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
        write(file, b"\n" * torn + line.encode() + b"\n")
    finally:
        os.close(file)


def open_file(path: Path) -> int:
    """A descriptor for `write`. The caller closes it. Raises OSError."""
    return os.open(path, _TO_APPEND, 0o666)


def write(file: int, data: bytes) -> None:
    """Append all of `data` to an open file or nothing of it: half a record would spoil the next one. Raises OSError.

    A network file system may send the data to its server only when a descriptor of the file is closed, and report only
    then that the disk is full. So a copy of the descriptor is closed; on a local disk that does nothing.
    """
    start = os.lseek(file, 0, os.SEEK_END)
    try:
        while data:  # when the disk becomes full, it takes a part and refuses the next call
            data = data[os.write(file, data) :]
        os.close(os.dup(file))
    except OSError:
        os.ftruncate(file, start)
        raise


def is_at(path: Path, file: int) -> bool:
    """Whether `path` still names this open file. Raises OSError."""
    return os.path.samestat(os.fstat(file), path.stat())


def replace(path: Path, count: int, tail: bytes) -> int:
    """Replace a file by one with its first `count` lines and `tail`; returns a descriptor for `write`. Raises OSError.

    The new file takes the old one's place by a rename, after which a power cut cannot undo it. A process that has the
    old file open, such as a rank that hangs in a write to it, can no longer change what readers see. A file that must
    have lines and is not there raises FileNotFoundError: this host may only believe so.
    """
    temporary = aside(path)
    file = os.open(temporary, _TO_APPEND | os.O_TRUNC, 0o666)
    try:
        if count or path.exists():
            with os.fdopen(os.dup(file), "ab") as copy:
                copy.writelines(_first_lines(path, count))
        write(file, tail)
        os.fsync(file)
        temporary.replace(path)
    except OSError:
        os.close(file)
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)
    return file


def rewind(path: Path, count: int) -> int:
    """Cut off every line after the first `count`, half-written ones too; returns a descriptor for `write`. Raises
    OSError.

    The file is replaced, see `replace`. Where the disk has no room for a copy it is cut in place.
    """
    for unfinished in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that died, or hangs
        unfinished.unlink(missing_ok=True)
    try:
        return replace(path, count, b"")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    file = open_file(path)
    os.ftruncate(file, sum(map(len, _first_lines(path, count))))
    return file


def _first_lines(path: Path, count: int) -> Iterator[bytes]:
    """A file's first `count` lines."""
    with path.open("rb") as file:
        yield from islice(file, count)

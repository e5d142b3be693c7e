"""Files past the page cache hold the same bytes, on any file system, and an error of the disk is an error of the save.

A byte that is missing at a boundary of blocks, or a refusal that is taken for a damaged file, would cost a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from laststep.checkpoint import direct
from laststep.checkpoint.direct import BLOCK, O_DIRECT, Input, write_hashed
from laststep.checkpoint.memory import HostMemory

SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 77]
PIECE = 2 * BLOCK


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DIRECT_BYTES", BLOCK)


def memory(size: int, offset: int = 0) -> memoryview:
    """Random bytes, whose place in memory is `offset` behind the beginning of a page."""
    tensor = HostMemory(size + offset).tensor
    tensor.copy_(torch.randint(256, (size + offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)))
    data: memoryview = tensor.numpy().data
    return data[offset:]


def chunks(data: memoryview, size: int = PIECE) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def holds(path: Path, data: memoryview, written: tuple[int, str]) -> bool:
    """Whether the file has these bytes, read in both ways, and was described rightly."""
    into = memory(len(data))
    with Input(path) as file:
        for start in range(0, file.size, PIECE):
            file.fill(start, into[start : start + PIECE])
    return path.read_bytes() == data == into and written == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 64])
@pytest.mark.parametrize("sync_bytes", [None, BLOCK])
def test_every_byte(size: int, offset: int, sync_bytes: int | None, tmp_path: Path) -> None:
    data = memory(size, offset)
    assert holds(tmp_path / "file", data, write_hashed(tmp_path / "file", chunks(data), sync_bytes))


@pytest.mark.parametrize("piece", [BLOCK + 5, 3 * BLOCK])
def test_chunks_of_any_size(piece: int, tmp_path: Path) -> None:
    """After one that does not fill its blocks, nothing is at the right place any more."""
    data = memory(9 * BLOCK + 3)
    assert holds(tmp_path / "file", data, write_hashed(tmp_path / "file", chunks(data, piece)))


def test_it_is_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all of this would be for nothing. A rescue stays in the page cache: it is read again at once."""
    seen = set_flags(monkeypatch, None)
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct I/O")
    write_hashed(tmp_path / "file", chunks(memory(3 * BLOCK)))
    assert seen[0] & O_DIRECT
    seen.clear()
    write_hashed(tmp_path / "rescue", chunks(memory(3 * BLOCK)), sync_bytes=BLOCK)
    assert not any(flags & O_DIRECT for flags in seen)


def set_flags(monkeypatch: pytest.MonkeyPatch, number: int | None) -> list[int]:
    """Note with which flags files are given; refuse direct I/O with this error number."""
    seen: list[int] = []
    real = fcntl.fcntl

    def wrapped(descriptor: int, command: int, *words: Any) -> Any:
        if command == fcntl.F_SETFL:
            seen.append(words[0])
            if number is not None and words[0] & O_DIRECT:
                raise OSError(number, os.strerror(number))
        return real(descriptor, command, *words)

    monkeypatch.setattr(fcntl, "fcntl", wrapped)
    return seen


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags(monkeypatch, number)
    data = memory(5 * BLOCK)
    assert holds(tmp_path / "file", data, write_hashed(tmp_path / "file", chunks(data)))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.EPERM])
@pytest.mark.parametrize("refused_at", [0, 1])
def test_it_refuses_a_write(refused_at: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another alignment may be asked for than BLOCK; and a file system that cannot do it may say anything."""
    data, calls, real = memory(7 * BLOCK + 9), [0], os.write

    def write(descriptor: int, chunk: Any) -> int:
        calls[0] += 1
        if calls[0] > refused_at and fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(descriptor, chunk)

    monkeypatch.setattr(os, "write", write)
    assert holds(tmp_path / "file", data, write_hashed(tmp_path / "file", chunks(data)))


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, real = memory(7 * BLOCK + 9), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, chunk: real(descriptor, chunk[: max(1, len(chunk) * 2 // 3)]))
    assert holds(tmp_path / "file", data, write_hashed(tmp_path / "file", chunks(data)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save has failed; the thread that hashed is gone."""

    def write(descriptor: int, chunk: Any) -> int:
        raise OSError(number, os.strerror(number))

    before = threading.active_count()
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_hashed(tmp_path / "file", chunks(memory(3 * BLOCK)))
    assert threading.active_count() == before


def test_a_writer_that_is_closed(tmp_path: Path) -> None:
    """What the chunks raise ends it."""

    def closed() -> Iterator[memoryview]:
        yield memory(2 * BLOCK)
        raise OSError("the attempt is ending")

    with pytest.raises(OSError, match="ending"):
        write_hashed(tmp_path / "file", closed())


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.EAGAIN, errno.EOPNOTSUPP])
def test_reads_that_are_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the page cache says of a file counts: direct I/O has errors of its own."""
    data, real = memory(5 * BLOCK + 3), os.preadv
    written = write_hashed(tmp_path / "file", chunks(data))

    def preadv(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if flags or fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert holds(tmp_path / "file", data, written)


def test_truncated_while_it_is_read(tmp_path: Path) -> None:
    data = memory(4 * BLOCK)
    write_hashed(tmp_path / "file", chunks(data))
    with Input(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", BLOCK)
        with pytest.raises(OSError, match="truncated meanwhile"):
            file.fill(0, memory(4 * BLOCK))

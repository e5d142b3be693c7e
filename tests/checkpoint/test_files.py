"""Files of a checkpoint are written and read past the page cache, where the file system has that."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from laststep.checkpoint import files
from laststep.checkpoint.files import BLOCK, FileEntry, read_files, write_hashed
from laststep.checkpoint.memory import HostMemory
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from tests.support.project import DEADLINE_S

CHUNK = 1 << 20


def memory_of(count: int) -> memoryview:
    """Memory with `count` random bytes."""
    memory = HostMemory(count)
    memory.tensor.random_(0, 256)
    return memory.tensor.numpy().data


def chunks(data: memoryview, size: int = CHUNK) -> Iterator[memoryview]:
    """The data, in pieces of this size."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def read(path: Path, entry: FileEntry) -> memoryview:
    """What a restore reads of a file; no error."""
    memory = HostMemory(entry["bytes"]).tensor.numpy().data
    assert read_files(path.parent, {path.name: entry}, {path.name: memory}, lambda: None) == {}
    return memory


def forget(path: Path) -> None:
    """Have the page cache drop a file."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path) -> bool:
    """Whether the page cache has the beginning of a file. Afterwards none of it is there."""
    with path.open("rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        finally:  # the look may have begun to read it
            forget(path)


def tells(folder: Path) -> bool:
    """Whether this file system tells what the page cache has, and drops it when told: the one of the tests does."""
    (path := folder / "probe").write_bytes(bytes(BLOCK))
    with contextlib.suppress(OSError):
        return is_cached(path) and not is_cached(path)
    return False


@pytest.mark.parametrize("size", [0, 64, BLOCK, BLOCK + 64, CHUNK - 64, 3 * CHUNK + BLOCK - 64, 9 * CHUNK])
@pytest.mark.parametrize("sync_bytes", [None, CHUNK])
def test_any_size(size: int, sync_bytes: int | None, tmp_path: Path) -> None:
    """Past the page cache only whole blocks can go: the rest of a file must be there as well."""
    data = memory_of(size)
    entry = write_hashed(tmp_path / "file", chunks(data), sync_bytes)
    assert entry == {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
    assert (tmp_path / "file").read_bytes() == data
    assert read(tmp_path / "file", entry) == data


def test_the_page_cache_stays_with_the_training(tmp_path: Path) -> None:
    """A checkpoint of many gigabytes must not push out the data set that the training reads again; it is not read
    before a restart."""
    data = memory_of(4 * CHUNK)
    entry = write_hashed(tmp_path / "file", chunks(data))
    if tells(tmp_path):
        assert not is_cached(tmp_path / "file")
        read(tmp_path / "file", entry)
        assert not is_cached(tmp_path / "file")


@pytest.mark.parametrize("refused", ["the switch", "the calls"])
def test_a_file_system_that_has_only_the_page_cache(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some say so when they are asked for it, others when it is used."""
    real_control, real_read, real_write = fcntl.fcntl, os.preadv, os.write
    direct = set[int]()

    def refuse(file: int) -> None:
        if file in direct:
            raise OSError(errno.EINVAL, "Invalid argument")

    def control(file: int, command: int, argument: int = 0) -> int:
        if not argument & os.O_DIRECT:
            direct.discard(file)
            return real_control(file, command, argument)
        if refused == "the switch":
            raise OSError(errno.EINVAL, "Invalid argument")
        direct.add(file)
        return 0

    def preadv(file: int, pieces: list[memoryview], offset: int) -> int:
        refuse(file)
        return real_read(file, pieces, offset)

    def write(file: int, piece: memoryview) -> int:
        refuse(file)
        return real_write(file, piece)

    data = memory_of(3 * CHUNK + 64)
    for name, fake in (("preadv", preadv), ("write", write)):
        monkeypatch.setattr(os, name, fake)
    monkeypatch.setattr(fcntl, "fcntl", control)
    entry = write_hashed(tmp_path / "file", chunks(data))
    assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert read(tmp_path / "file", entry) == data


def test_a_write_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may take less than a block at a time. The rest is written where it belongs."""
    real, counts = os.write, iter([100, BLOCK, 5])
    monkeypatch.setattr(os, "write", lambda file, piece: real(file, piece[: next(counts, len(piece))]))
    data = memory_of(3 * CHUNK)
    entry = write_hashed(tmp_path / "file", chunks(data))
    assert (tmp_path / "file").read_bytes() == data and entry["sha256"] == hashlib.sha256(data).hexdigest()


def test_memory_that_begins_within_a_block(tmp_path: Path) -> None:
    """Parts of a rescue are cut anywhere. Whatever the disk says to that, their bytes arrive."""
    data = memory_of(3 * CHUNK)[64 : 2 * CHUNK + 192]
    entry = write_hashed(tmp_path / "file", chunks(data, CHUNK + 64))
    assert (tmp_path / "file").read_bytes() == data
    assert entry["sha256"] == hashlib.sha256(data).hexdigest()


def test_what_the_disk_says_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache might accept what the disk has refused, and report that only at the sync, or never."""
    entry = write_hashed(tmp_path / "file", chunks(data := memory_of(CHUNK)))

    def refuse(*_: object) -> int:
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_hashed(tmp_path / "again", chunks(data))
    monkeypatch.setattr(os, "preadv", refuse)
    memory = HostMemory(CHUNK).tensor.numpy().data
    errors = read_files(tmp_path, {"file": entry}, {"file": memory}, lambda: None)
    assert "No space left" in str(errors["file"])


def test_every_file_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's files stand in one buffer, one after another. Where one began within a block, the disk might refuse to
    take it from there, and the save would cost the training a copy of it."""
    monkeypatch.setattr(files, "FILE_BYTES", CHUNK)
    writer = CheckpointWriter(store := CheckpointStore(tmp_path / "of"), dist.HashStore(), 0, 1, torch.device("cpu"))
    writer.start(CheckpointInfo(1, 1, 1, {}), {"weights": torch.rand(CHUNK + 48)}, lambda: None, 1, 0)
    assert writer.wait(DEADLINE_S) and writer.error is None
    writer.close()
    parts = [store.path(1) / name for name in store.manifest(1).shards]
    assert len(parts) == 4 and len({path.stat().st_size % BLOCK for path in parts}) > 1
    if tells(tmp_path):
        assert [path.name for path in parts if is_cached(path)] == []
    store.verify(1)

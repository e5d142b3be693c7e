"""Files of a checkpoint are written and read past the page cache, where the file system has that."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
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


# Threads, forks and what else the process does meanwhile


def test_a_write_that_hangs(tmp_path: Path) -> None:
    """A disk hangs in a save, and the training fails: the process must end, or it would hold its node for hours."""
    program = """
import time
from laststep.checkpoint.files import at_once
from laststep.ranks.process import start_thread
start_thread("saver", lambda: at_once([lambda: time.sleep(3600)] * 3))
print("the training has failed", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "the training has failed\n"), done.stderr


@pytest.mark.parametrize("threads", [0, 1, 2, 9])
def test_at_the_limit_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have no more threads to give. Each file is still written once: a second time it would already be
    there, and the save would fail."""
    real, left, done = threading.Thread.start, iter(range(threads)), list[int]()

    def start(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert files.at_once([partial(done.append, number) for number in range(4)]) == [None] * 4
    assert sorted(done) == [0, 1, 2, 3]


def test_the_first_of_several_errors_is_raised() -> None:
    """As if the work were done in its order."""

    def fails(number: int) -> None:
        raise OSError(number, "refused")

    with pytest.raises(OSError, match=r"Errno 7"):
        files.at_once([partial(print), partial(fails, 7), partial(fails, 8)])


def test_forked_meanwhile(tmp_path: Path) -> None:
    """A loader's worker that is forked during a save or a restore must not keep the files open: for as long as it lives
    the room of a checkpoint that is deleted later would be missing on a full disk."""
    program = f"""
import os
from pathlib import Path
from laststep.checkpoint import files
from laststep.checkpoint.memory import HostMemory
path = Path({str(tmp_path)!r}) / "shard"
def forks(what):
    if os.fork() == 0:
        left = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{fd}}")
                and os.readlink(f"/proc/self/fd/{{fd}}") == str(path)]
        print(what, len(left), flush=True)
        os._exit(0)
    os.wait()
def chunks():
    yield memoryview(bytes(10000))
    forks("written")
    yield memoryview(bytes(10000))
entry = files.write_hashed(path, chunks())
memory = {{path.name: HostMemory(20000).tensor.numpy().data}}
errors = files.read_files(path.parent, {{path.name: entry}}, memory, lambda: forks("read"))
print(entry["bytes"], errors)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.splitlines() == ["written 0", "read 0", "20000 {}"], done.stderr


def test_memory_in_a_forked_process() -> None:
    """Its addresses are free there, and go to others: if the child frees it, the child's own memory is gone."""
    program = """
import gc, mmap, os
from laststep.checkpoint.memory import HostMemory
COUNT = 64 << 20
memory = [HostMemory(COUNT)]
if os.fork() == 0:
    own = mmap.mmap(-1, COUNT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # where the other was
    memory.clear()
    gc.collect()
    own[:] = bytes(COUNT)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "0\n", done.stderr

"""The ranks of an attempt read a checkpoint together: each byte once, the right bytes, and nothing that is damaged.

The ranks are threads that share this process: their collectives copy from one to the others.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laststep.checkpoint import files, memory, restore
from laststep.checkpoint.memory import HostMemory
from laststep.checkpoint.pack import load
from laststep.checkpoint.restore import NewestCheckpoint, SharedCheckpoint, shares
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointWriter
from laststep.config.errors import DiskError
from laststep.ranks.group import Group
from laststep.ranks.seal import Seal
from tests.checkpoint.test_writer import info_of, nothing, same
from tests.support.disk import refusing
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import a_world

CPU = torch.device("cpu")


class Sent:
    """What the ranks of one test send to each other."""

    def __init__(self, size: int) -> None:
        self.keys, self.barrier = dist.HashStore(), threading.Barrier(size, timeout=DEADLINE_S)
        self.seal = Seal()
        self.source: Tensor | None = None


class ThreadGroup(Group):
    """One rank's group, whose collectives copy within this process."""

    def __init__(self, rank: int, size: int, sent: Sent) -> None:
        super().__init__(a_world(rank, size), sent.keys, CPU, seal=sent.seal)
        self.sent = sent

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        if self.world.rank == source:
            self.sent.source = tensor
        self.sent.barrier.wait()
        if self.world.rank != source:
            assert self.sent.source is not None
            tensor.copy_(self.sent.source)
        self.sent.barrier.wait()
        return lambda: None

    def broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.start_broadcast(tensor, 0)


class Rank:
    """One rank that restores."""

    def __init__(self, rank: int, size: int, sent: Sent) -> None:
        self.group = ThreadGroup(rank, size, sent)
        self.progress = 0
        self.warnings: list[str] = []

    def advance(self, count: int = 1) -> None:
        self.progress += count

    def read(self, store: CheckpointStore) -> SharedCheckpoint | None:
        candidates = store.candidates(self.warnings.append) if self.group.world.rank == 0 else iter(())
        return NewestCheckpoint(store, self.group, candidates, self.warnings.append, self.advance).finish()


def together(size: int, work: Callable[[Rank], Any]) -> list[Any]:
    """Each rank does the work, all at the same time; what each returns, in rank order."""
    sent = Sent(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Rank(rank, size, sent)), range(size)))


def state_of(step: int) -> dict[str, Any]:
    """A state with tensors of several kinds, some of them larger than a piece, and of odd sizes."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(300, 7, 5, 5, generator=generator)
    return {
        "position": {"step": step, "samples": 8 * step},
        "model": {"weight": weight.contiguous(memory_format=torch.channels_last), "empty": torch.empty(0, 3)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight * 2}}, "param_groups": [{"lr": 0.1}]},
        "mine": [torch.arange(5), "text", (torch.tensor(True), None)],
    }


def without_position(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in state.items() if name != "position"}


def save(store: CheckpointStore, step: int, shards: int) -> None:
    """Commit a checkpoint of `state_of(step)`."""
    keys = dist.HashStore()
    writers = [CheckpointWriter(store, keys, rank, shards, CPU) for rank in range(shards)]
    for writer in writers:
        writer.start(info_of(step), state_of(step), nothing, 9, 0)
    for writer in writers:
        assert writer.wait(DEADLINE_S) and writer.error is None
        writer.close()


def flip(store: CheckpointStore, step: int, name: str) -> None:
    """Damage a file in a way that its size does not show."""
    path = store.path(step) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    monkeypatch.setattr(files, "STRIPE_BYTES", 1)  # so that each writer has a file
    monkeypatch.setattr(files, "READ_BYTES", 20_000)  # so that the files consist of several
    monkeypatch.setattr(restore, "PIECE_BYTES", 32_768)
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads."""
    counts: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(real(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return counts


@pytest.mark.parametrize(("shards", "ranks"), [(1, 1), (1, 3), (4, 1), (3, 2), (4, 4), (2, 5)])
def test_every_byte_is_read_once(shards: int, ranks: int, store: CheckpointStore, read_bytes: list[int]) -> None:
    """However many ranks wrote it and read it, each gets the whole state, bit for bit, and the disk serves it once: a
    disk that had to serve it to 1,024 ranks would take minutes for what takes seconds."""
    save(store, 5, shards)

    def restores(rank: Rank) -> tuple[Any, Any, int]:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        return checkpoint.position, checkpoint.load({}, rank.advance), rank.progress

    for position, state, _ in together(ranks, restores):
        assert position == state_of(5)["position"]
        assert same(state, without_position(state_of(5)))
    assert sum(read_bytes) == store.manifest(5).bytes


def test_shares_are_even(store: CheckpointStore) -> None:
    """No rank reads, or holds, more than it must; neighbouring ranks, which may be of one node, do not read all."""
    save(store, 5, 8)
    manifest = store.manifest(5)
    for size in (1, 2, 4, 8):
        owners = [shares(manifest, size)[name] for name in manifest.shards]
        assert owners == [number * size // 8 for number in range(8)]
    save(store, 6, 2)
    first, second = (shares(store.manifest(6), 8)[name] for name in store.manifest(6).shards)
    assert second - first == 4


def test_straight_into_the_tensors(store: CheckpointStore) -> None:
    """A rank holds its model already: a second copy of it might not fit. A tensor of another layout is left alone, and
    one that the rank lacks is made."""
    save(store, 5, 2)

    def restores(rank: Rank) -> None:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        live = state_of(1)
        weight, average = live["model"]["weight"], live["optimizer"]["state"][0]["exp_avg"]
        average = average.contiguous(memory_format=torch.channels_last)
        live["optimizer"]["state"][0] = {"exp_avg": average}
        untouched = average.clone()
        del live["mine"]
        for last in (False, True):  # a custom loop loads twice, and changes what it has loaded
            weight.zero_()
            state = checkpoint.load(live, rank.advance, last)
            assert same(state, without_position(state_of(5)))
            assert state["model"]["weight"].data_ptr() == weight.data_ptr(), "no copy of the weights was made"
        assert torch.equal(average, untouched), "a checkpoint of another layout must not be copied as if it fitted"

    together(2, restores)


def test_damage_found_by_one_rank(store: CheckpointStore) -> None:
    """All ranks fall back to the same older checkpoint, or they would train different models; rank 0 says why."""
    for step in (3, 5, 7):
        save(store, step, 2)
    flip(store, 7, "shard_0001-of-0002.bin")
    flip(store, 5, "structure.pt")

    def restores(rank: Rank) -> tuple[int, list[str]]:
        checkpoint = rank.read(store)
        assert checkpoint is not None and same(checkpoint.load({}, rank.advance), without_position(state_of(3)))
        return checkpoint.manifest.step, rank.warnings

    (zero, said), (one, nothing_said) = together(2, restores)
    assert zero == one == 3 and nothing_said == []
    assert said == [
        "skipped step_000000007: shard_0001-of-0002.bin differs from its SHA-256 in the manifest",
        "skipped step_000000005: structure.pt differs from its SHA-256 in the manifest",
    ]


def test_nothing_intact_is_left(store: CheckpointStore) -> None:
    """The run starts from scratch, on all ranks."""
    save(store, 3, 2)
    flip(store, 3, "shard_0000-of-0002.bin")
    assert together(2, lambda rank: rank.read(store)) == [None, None]


def test_a_disk_that_fails_on_one_node(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with an old view of a shared disk, or a bad cable, must not set the run back by hours: rank 0 reads what
    that node cannot, and says so."""
    save(store, 3, 2)
    save(store, 7, 2)
    real, failed = os.preadv, list[int]()

    def fails_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if "shard_0001" in os.readlink(f"/proc/self/fd/{descriptor}") and not failed:
            failed.append(offset)
            raise OSError(116, "Stale file handle")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails_once)

    def restores(rank: Rank) -> tuple[int, list[str]]:
        checkpoint = rank.read(store)
        assert checkpoint is not None and same(checkpoint.load({}, rank.advance), without_position(state_of(7)))
        return checkpoint.manifest.step, rank.warnings

    (step, said), _ = together(2, restores)
    assert step == 7
    assert said == [
        "WARNING: step 7: shard_0001-of-0002.bin cannot be read: Stale file handle on rank 1 on here; "
        "rank 0 can read it"
    ]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["structure.pt", "shard_0000-of-0002.bin"])
def test_a_disk_that_fails_once_on_rank_0(store: CheckpointStore, name: str, number: int) -> None:
    """Its files have no other reader. They are read once more before the run is set back."""
    save(store, 3, 2)
    save(store, 7, 2)

    def restores(rank: Rank) -> tuple[int, list[str]]:
        checkpoint = rank.read(store)
        assert checkpoint is not None and same(checkpoint.load({}, rank.advance), without_position(state_of(7)))
        return checkpoint.manifest.step, rank.warnings

    with refusing(store.path(7) / name, number, times=1, call="open"):
        (step, said), _ = together(2, restores)
    assert step == 7 and len(said) == 1 and said[0].endswith(" on rank 0 on here; rank 0 can read it")


def test_a_disk_that_refuses_to_be_read(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the checkpoint, so the attempt fails. The next one, perhaps elsewhere, can read it."""
    monkeypatch.setattr(restore, "READ_AGAIN_S", 0.0)
    save(store, 3, 1)
    save(store, 7, 1)

    def is_refused(rank: Rank) -> None:
        with pytest.raises(DiskError, match=r"step_000000007: structure\.pt cannot be read: Stale file handle"):
            rank.read(store)

    with refusing(store.path(7) / "structure.pt", errno.ESTALE, call="open"):
        together(1, is_refused)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.EILSEQ], ids=errno.errorcode.get)
def test_a_lost_sector(store: CheckpointStore, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk says EIO through the page cache, and past it what the device said. Each attempt of a run whose newest
    checkpoint cannot be read any more must not fail for it: the one before is intact. And it must not hold the memory
    of both until it ends: that may be more than the node has."""
    monkeypatch.setattr(restore, "READ_AGAIN_S", 0.0)
    save(store, 3, 2)
    save(store, 7, 2)

    def restores(rank: Rank) -> SharedCheckpoint:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        return checkpoint

    gc.collect()
    gc.disable()  # as in a rank
    try:
        before = len(memory._mapped)
        with refusing(store.path(7) / "shard_0001-of-0002.bin", number, call="preadv"):
            found = together(2, restores)
        assert [checkpoint.manifest.step for checkpoint in found] == [3, 3]
        held = [len(checkpoint._memory) for checkpoint in found]
        assert len(memory._mapped) - before == sum(held), "each file of the older checkpoint, and no other"
    finally:
        gc.enable()


def test_the_rank_that_the_others_wait_for(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog names the rank with the least progress. That must be the one whose disk hangs, not one with nothing
    to read; and each read must count, or a slow disk would be taken for a hang."""
    save(store, 5, 2)
    real, stuck, go_on = os.preadv, threading.Event(), threading.Event()

    def hangs(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if "shard_0001" in os.readlink(f"/proc/self/fd/{descriptor}") and offset >= 3 * files.READ_BYTES:
            stuck.set()
            assert go_on.wait(DEADLINE_S)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", hangs)
    ranks: dict[int, Rank] = {}
    moments: list[list[int]] = []

    def look() -> None:
        wait_until(stuck.is_set, "no rank has come to the place where the disk hangs")
        most = files.reading_steps({"": store.manifest(5).files["shard_0000-of-0002.bin"]}) + 1
        wait_until(lambda: ranks[0].progress >= most, "rank 0 has not read its share")
        wait_until(lambda: ranks[3].progress > 3, "rank 3 has not read what it can")
        moments.append([ranks[number].progress for number in range(4)])
        go_on.set()

    def restores(rank: Rank) -> int:
        ranks[rank.group.world.rank] = rank
        assert rank.read(store) is not None
        return rank.progress

    looking = threading.Thread(target=look)
    looking.start()
    ends = together(4, restores)
    looking.join(DEADLINE_S)
    owner = shares(store.manifest(5), 4)["shard_0001-of-0002.bin"]
    (moment,) = moments
    assert min(range(4), key=lambda rank: moment[rank]) == owner, moment
    assert len(set(ends)) == 1, "all ranks that have read their share are level"


def test_a_reading_that_nobody_waits_for(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's code has failed while the checkpoint is read. Before its threads end, the rank must read neither the
    rest of 100 GB nor a piece of each of 4,096 files."""
    save(store, 5, 6)
    real, begun, go_on = os.preadv, threading.Event(), threading.Event()
    pieces = set[tuple[str, int]]()  # each may take a read past the page cache, and one for what is left

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        pieces.add((os.readlink(f"/proc/self/fd/{descriptor}"), offset // files.READ_BYTES))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    rank, before = Rank(0, 1, Sent(1)), set(threading.enumerate())
    with (
        pytest.raises(ImportError),
        NewestCheckpoint(store, rank.group, store.candidates(print), print, rank.advance),
    ):
        assert begun.wait(DEADLINE_S)
        raise ImportError("the user's")
    go_on.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "threads of the reading have not ended")
    assert 0 < len(pieces) <= files.HASHING_THREADS < len(store.manifest(5).files)


def test_memory_is_returned_piece_by_piece() -> None:
    """While a share is loaded the tensors grow: without this, one rank alone would hold the state twice."""
    memory = HostMemory(1 << 20)
    memory.tensor.fill_(7)
    before = resident()
    memory.release(0, 1 << 19)
    assert before - resident() >= (1 << 19) - (1 << 17)
    assert not memory.tensor[: 1 << 19].any() and bool((memory.tensor[1 << 19 :] == 7).all())
    assert HostMemory(0).tensor.numel() == 0


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_more_files_than_a_process_may_open(store: CheckpointStore) -> None:
    """`export` of a large run, under the usual limit of 1,024 files: a checkpoint may have four times as many."""
    save(store, 5, 40)
    manifest, limits = store.manifest(5), resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(manifest.shards) == 40
    opened = set(map(int, os.listdir("/proc/self/fd")))
    *_, last = itertools.islice((number for number in itertools.count() if number not in opened), 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, limits[1]))
    try:
        state = load(store.path(5), manifest)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert same(without_position(state), without_position(state_of(5)))
    assert len(os.listdir("/proc/self/fd")) <= len(opened)


def test_load_is_what_ranks_load(store: CheckpointStore) -> None:
    """`export`, `evaluate` and `verify` read alone; they must see what the ranks see."""
    save(store, 5, 3)
    manifest = store.manifest(5)
    assert same(without_position(load(store.path(5), manifest)), without_position(state_of(5)))

"""CheckpointWriter: a committed checkpoint holds exactly the state handed over, whichever rank fails or dies meanwhile.

In tests where a rank dies the ranks are processes that share a TCPStore; elsewhere all writers are in this process.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from laststep.checkpoint import files
from laststep.checkpoint import store as store_module
from laststep.checkpoint.export import weights_sha256
from laststep.checkpoint.files import NO_PATIENCE, CheckpointError, Patience
from laststep.checkpoint.pack import Packed, load
from laststep.checkpoint.store import LUSTRE, MANIFEST, CheckpointStore, Manifest, shard_name
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from tests.support.disk import failing_at
from tests.support.project import DEADLINE_S
from tests.support.states import save_alone

CPU = torch.device("cpu")
SMALL_STRIPE = 1 << 14  # so that the ranks of these tests share their small states, like those of a large model
KEEP = (3, 0)  # keep_last, keep_best


def state_of(step: int) -> dict[str, Any]:
    """A state like that of a training, different at each step; 1.3 MB."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(64, 64, 3, 3, generator=generator)
    return {
        "position": {"step": step, "metrics": {"val_loss": 0.25 * step}},
        "model": {"weight": weight.to(memory_format=torch.channels_last), "batches": torch.tensor(step)},
        "optimizer": {
            "state": {0: {"momentum": torch.randn(180_000, generator=generator)}},
            "lr": [0.1, 0.2],
            "groups": [None, (1, "x")],
        },
    }


def info_of(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, 1, 8 * step, {"val_loss": 0.25 * step})


def nothing() -> None:
    """For saves that need no work before the commit."""


def same(a: Any, b: Any) -> bool:
    """Whether two states are bit-identical, NaN included."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu().reshape(-1).view(torch.uint8)


def newest_state(store: CheckpointStore) -> Any:
    """The state that a resume would load."""
    newest = store.newest(lambda text: None)
    assert newest is not None
    return load(store.path(newest.step), newest)


def assert_only_whole(store: CheckpointStore, *steps: int) -> None:
    """These checkpoints are there, each with the state handed over, and nothing else is in the folder."""
    assert store.steps() == sorted(steps)
    for step in steps:
        assert same(load(store.path(step), store.verify(step)), state_of(step))
    if store.folder.exists():
        assert sorted(path.name for path in store.folder.iterdir()) == [store.path(s).name for s in sorted(steps)]


def end(writer: CheckpointWriter) -> None:
    """Wait for the last save."""
    assert writer.wait(DEADLINE_S), (
        f"no end of the save within {DEADLINE_S:.0f} s, missing ranks: {writer.missing_ranks}"
    )


def save(writers: list[CheckpointWriter], step: int, before_commit: Callable[[], None] = nothing) -> None:
    """Save the state of `step` from all ranks, and wait until it is committed."""
    for writer in writers:
        writer.start(info_of(step), state_of(step), before_commit, *KEEP)
    for writer in writers:
        end(writer)


@contextmanager
def writers(store: CheckpointStore, size: int) -> Iterator[list[CheckpointWriter]]:
    """The writers of all ranks of one attempt, in this process."""
    keys = dist.HashStore()
    ranks = [CheckpointWriter(store, keys, rank, size, CPU) for rank in range(size)]
    try:
        yield ranks
    finally:
        for writer in ranks:
            writer.close()


@pytest.fixture(autouse=True, scope="module")
def stripes_are_small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "STRIPE_BYTES", SMALL_STRIPE)
        yield


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


class Rank:
    """What a rank's process works with."""

    def __init__(self, folder: Path, rank: int, size: int, test: Connection) -> None:
        self.store, self.rank, self.test = CheckpointStore(folder / "checkpoints"), rank, test
        port = folder / "port"
        if rank == 0:
            self.keys = dist.TCPStore("localhost", 0, size, True, wait_for_workers=False)
            (folder / "port.tmp").write_text(str(self.keys.port))
            (folder / "port.tmp").rename(port)
        else:
            until(port.exists, "rank 0 published no port")
            self.keys = dist.TCPStore("localhost", int(port.read_text()), size, False, wait_for_workers=False)
        self.writer = CheckpointWriter(self.store, self.keys, rank, size, CPU)

    def outcome(self) -> str | None:
        """The error of the last save, None if it was committed."""
        return None if self.writer.error is None else str(self.writer.error)

    def leave(self) -> None:
        """Wait until the test no longer needs this rank: rank 0 serves the keys."""
        self.test.recv()
        self.writer.close()


class Ranks:
    """Ranks in processes of their own, each running `body`."""

    def __init__(self, folder: Path, size: int, body: Callable[[Rank], None]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.checkpoint.test_writer"])
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_process, args=(body, folder, rank, size, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def hear(self, rank: int) -> Any:
        """The next message from that rank."""
        assert self.pipes[rank].poll(DEADLINE_S), f"rank {rank} said nothing within {DEADLINE_S:.0f} s"
        return self.pipes[rank].recv()

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(DEADLINE_S)

    def leave(self) -> list[int | None]:
        """Let all ranks end; returns their exit statuses."""
        for process, pipe in zip(self.processes, self.pipes):
            if process.is_alive():
                pipe.send("leave")
        for process in self.processes:
            process.join(DEADLINE_S)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        return codes


def _process(body: Callable[[Rank], None], folder: Path, rank: int, size: int, test: Connection) -> None:
    torch.set_num_threads(1)
    files.STRIPE_BYTES = SMALL_STRIPE
    body(Rank(folder, rank, size, test))


def until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)


def saves_twice(rank: Rank) -> None:
    for step in (1, 2):
        save([rank.writer], step)
        rank.test.send(rank.outcome())
    rank.leave()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks(size: int, tmp_path: Path, store: CheckpointStore) -> None:
    """Each rank writes only its stripe, or saving would not get faster with more ranks. One reader gets the whole
    state, or a run could not continue on another number of ranks."""
    ranks = Ranks(tmp_path, size, saves_twice)
    for rank in range(size):
        assert [ranks.hear(rank), ranks.hear(rank)] == [None, None]
    assert ranks.leave() == [0] * size
    assert_only_whole(store, 1, 2)
    manifest = store.manifest(2)
    assert (manifest.world_size, manifest.epoch, manifest.samples, manifest.metrics) == (size, 1, 16, {"val_loss": 0.5})
    written = [manifest.files[shard_name(rank, size)]["bytes"] for rank in range(size)]
    assert max(written) <= Packed(state_of(2)).bytes / size + 64


def test_what_training_changes_meanwhile_is_not_saved(store: CheckpointStore) -> None:
    """The next steps change weights, momentum and counters before the writer has written them."""
    for step in (1, 2):  # into a new buffer, then into the same one again
        state, metrics, changed = state_of(step), {"val_loss": 0.5}, threading.Event()
        with writers(store, 1) as [writer]:
            info = CheckpointInfo(step, 1, 8, metrics)
            writer.start(info, state, lambda event=changed: event.wait(DEADLINE_S), *KEEP)  # type: ignore[misc]
            state["model"]["weight"].zero_()
            state["optimizer"]["state"][0]["momentum"] = torch.zeros(1)
            state["optimizer"]["lr"].append(3)
            state["position"]["step"] = 99
            metrics["val_loss"] = 99.0
            changed.set()
            end(writer)
        assert store.manifest(step).metrics == {"val_loss": 0.5}
    assert_only_whole(store, 1, 2)


def test_one_in_flight(store: CheckpointStore) -> None:
    """Otherwise, on a disk slower than the training, copies of the state would pile up until memory is full."""
    go_on = threading.Event()
    with writers(store, 1) as [writer]:
        writer.start(info_of(1), state_of(1), lambda: assert_set(go_on), *KEEP)
        assert not writer.wait(0) and store.steps() == []
        threading.Timer(0.2, go_on.set).start()
        writer.start(info_of(2), state_of(2), nothing, *KEEP)
        assert store.steps()[0] == 1, "the first save is committed before the second starts"
        end(writer)
    assert_only_whole(store, 1, 2)


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def test_saved_again_and_pruned(store: CheckpointStore) -> None:
    """A step saved before its validation is saved again after it. Each commit prunes to keep_last and keep_best."""
    with writers(store, 2) as ranks:
        for step in (1, 2, 2, 3, 4, 5):
            save(ranks, step)
            assert all(writer.error is None for writer in ranks)
    assert_only_whole(store, 3, 4, 5)


def test_keys_do_not_pile_up(store: CheckpointStore) -> None:
    """A run of months saves thousands of times, and one process holds the keys of all ranks in memory."""
    keys = dist.HashStore()
    ranks = [CheckpointWriter(store, keys, rank, 3, CPU) for rank in range(3)]
    counts = []
    for step in range(1, 6):
        save(ranks, step)
        counts.append(keys.num_keys())
    assert counts[0] == counts[-1]


def fails_once_on_rank_1(rank: Rank) -> None:
    save([rank.writer], 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    save([rank.writer], 2)
    rank.test.send((rank.outcome(), rank.store.steps()))
    rank.test.recv()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save([rank.writer], 3)
    rank.test.send(rank.outcome())
    rank.leave()


def test_one_rank_fails(tmp_path: Path, store: CheckpointStore) -> None:
    """If one node's disk is full no rank may take the checkpoint for committed, every rank must know the reason, and no
    leftover file may prevent the next save."""
    ranks = Ranks(tmp_path, 2, fails_once_on_rank_1)
    says = f"{store.path(2)}: could not be written: [Errno 27] File too large"
    for rank in (0, 1):
        assert ranks.hear(rank) == (says, [1])
    assert_only_whole(store, 1)
    for pipe in ranks.pipes:
        pipe.send("go on")
    assert [ranks.hear(rank) for rank in (0, 1)] == [None, None]
    assert ranks.leave() == [0, 0]
    assert_only_whole(store, 1, 3)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_the_disk_refuses(number: int, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the disk reaches the user, who has to act on it. Later saves succeed."""
    with writers(store, 2) as ranks:
        save(ranks, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", refusing(number))
            save(ranks, 2)
        for writer in ranks:
            assert str(writer.error).startswith(
                f"{store.path(2)}: could not be written: [Errno {number}] {os.strerror(number)}"
            )
        save(ranks, 3)
    assert_only_whole(store, 1, 3)


def refusing(number: int) -> Callable[..., None]:
    def refuse(path: Any, *words: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return refuse


def test_metrics_that_cannot_be_kept(store: CheckpointStore) -> None:
    """A checkpoint refers to lines of metrics.jsonl, which must be on the disk before it is committed."""
    with writers(store, 2) as ranks:
        save(ranks, 1, before_commit=lambda: refusing(errno.ENOSPC)("metrics.jsonl"))
        for writer in ranks:
            assert "could not be written: [Errno 28] No space left on device: 'metrics.jsonl'" in str(writer.error)
        assert_only_whole(store)


def test_a_folder_that_vanished_and_came_back(store: CheckpointStore) -> None:
    """Somebody deletes the checkpoints after one rank has written its shard, and another rank creates the folder again:
    that is half a checkpoint and must not be committed."""
    keys = dist.HashStore()
    ranks = [CheckpointWriter(store, keys, rank, 2, CPU) for rank in range(2)]

    def vanish() -> None:
        until(lambda: keys.check(["save/1/1"]), "rank 1 did not report its shard")
        [writing] = store.folder.iterdir()
        shutil.rmtree(store.folder)
        writing.mkdir(parents=True)

    save(ranks, 1, vanish)
    for writer in ranks:
        assert "No such file or directory" in str(writer.error) and "shard_0001-of-0002.bin" in str(writer.error)
    assert_only_whole(store)
    save(ranks, 2)
    assert_only_whole(store, 2)


def test_a_state_that_could_not_be_loaded(store: CheckpointStore) -> None:
    """torch.load runs no code from a checkpoint. A state that it would refuse must be refused by the save: at the
    resume it is too late."""
    with writers(store, 1) as [writer]:
        writer.start(info_of(1), {"mine": Path("x")}, nothing, *KEEP)
        end(writer)
        assert "Weights only load failed" in str(writer.error)
    assert_only_whole(store)


@pytest.mark.parametrize(("stripe_bytes", "count"), [(1 << 30, 1), (300_000, 3), (1, 4)])
def test_no_more_files_than_are_worth_it(
    stripe_bytes: int, count: int, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 ranks that save a small model must not create 1,024 files. Every rank still reports, so a rank that died
    is noticed; and a checkpoint with any number of files is read, by any number of ranks."""
    monkeypatch.setattr(files, "STRIPE_BYTES", stripe_bytes)
    with writers(store, 4) as ranks:
        save(ranks, 1)
        assert [writer.error for writer in ranks] == [None] * 4
    assert_only_whole(store, 1)
    assert len(store.manifest(1).shards) == count


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 1000, 20_000])
@pytest.mark.parametrize("megabytes", [0, 1, 64, 65, 500, 200_000, 20_000_000])
def test_each_file_has_one_writer(ranks: int, megabytes: int) -> None:
    """A file that nobody writes would never be reported; one that two ranks write, each would spoil for the other.
    Fewer writers than ranks are spread over the nodes. Each core hashes one file: a rank with much to write has
    several, unless there are thousands of ranks: a folder must not get tens of thousands of files more."""
    count = megabytes << 20
    owned = [(rank, found) for rank in range(ranks) if (found := files.own_files(count, rank, ranks))]
    written = [file for _, found in owned for file in found]
    assert [file.number for file in written] == list(range(files.file_count(count, ranks)))
    assert owned[0][0] == 0, "rank 0 writes the structure too"
    bounds = [file.bounds(count) for file in written]
    assert bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    most = max(len(found) for _, found in owned)
    assert most == 1 or (len(written) <= 4096 and min(end - begin for begin, end in bounds) >= 64e6)
    assert most == 4 or ranks > 1000 or megabytes < 256 * ranks


def test_an_error_of_any_kind_in_the_commit(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone commits. Of an error that it did not expect the other ranks heard nothing: they waited for the
    result until the watchdog ended the attempt. Training continues, and the next save is tried."""
    with writers(store, 2) as ranks:
        with monkeypatch.context() as patch:
            patch.setattr(store, "commit", Mock(side_effect=RecursionError("of some library")))
            save(ranks, 1)
            assert all("RecursionError: of some library" in str(writer.error) for writer in ranks)
        save(ranks, 2)
        assert [writer.error for writer in ranks] == [None, None]
    assert_only_whole(store, 2)


def test_reports_in_one_round_trip(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 1,024 must not ask the key-value store 1,024 times at each look."""
    asked = {"check": 0, "get": 0}
    with writers(store, 8) as ranks:
        keys = ranks[0]._keys
        monkeypatch.setattr(ranks[0], "_keys", Counted(keys, asked))
        save(ranks, 1)
    assert store.steps() == [1]
    assert asked["get"] <= 2, "the token and the result, but no single report"


class Counted:
    """A key-value store that counts what it is asked."""

    def __init__(self, store: dist.Store, asked: dict[str, int]) -> None:
        self._store, self._asked = store, asked

    def __getattr__(self, name: str) -> Any:
        self._asked[name] = self._asked.get(name, 0) + 1
        return getattr(self._store, name)


class CountingStore(CheckpointStore):
    """Counts the commits that succeeded."""

    commits = 0

    def commit(
        self, writing: Path, manifest: Manifest, replaces: bool = True, patience: Patience = NO_PATIENCE
    ) -> Path:
        path = super().commit(writing, manifest, replaces, patience)
        self.commits += 1
        return path


@pytest.mark.parametrize(
    ("step", "alone"),
    [(5, False), (7, False), (7, True)],  # one rank alone never replaces an intact checkpoint
    ids=["two-ranks-same-step", "two-ranks-next-step", "alone-next-step"],
)
@pytest.mark.parametrize("error", [SystemExit(), OSError(28, "No space left on device")], ids=["killed", "disk"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fails_anywhere(step: int, alone: bool, error: BaseException, tmp_path: Path) -> None:
    """All processes killed, or the disk full, at each disk call: the next attempt finds the old or the new checkpoint,
    intact, and nothing else. (A thread that raises SystemExit ends silently.)"""
    for call in range(1000):
        store = CountingStore(tmp_path / str(call))
        save_alone(store, info_of(5), state_of(5), 1, "old")
        new = {**state_of(step), "new": True}
        with writers(store, 2) as ranks, failing_at(call, error) as calls:
            if alone:
                with suppress(SystemExit, CheckpointError):
                    save_alone(store, info_of(step), new, 2, "new")
            else:
                for writer in ranks:
                    writer.start(info_of(step), new, nothing, *KEEP)
                if isinstance(error, OSError):
                    for writer in ranks:
                        end(writer)
                    assert str(ranks[1].error) == str(ranks[0].error)
                else:
                    until(lambda: any(writer.wait(0) for writer in ranks), "both ranks wait for a dead thread")
                    for writer in ranks:
                        writer.close()
        committed = store.commits == 2
        store.recover()
        found = newest_state(store)
        assert same(found, new) or (not committed and same(found, state_of(5)))
        assert not [path for path in store.folder.iterdir() if not path.name[5:].isdigit()], "nothing is left over"
        shutil.rmtree(store.folder)
        if len(calls) <= call:
            assert committed and call > 12, "the disk calls were seen"
            return
    raise AssertionError("a save takes a thousand disk calls")


def stuck_in_fsync(rank: Rank) -> None:
    """Saves once; during the second save rank 1 hangs in its shard."""
    save([rank.writer], 1)
    if rank.rank == 1:

        def stuck(descriptor: Any) -> None:
            rank.test.send("stuck")
            time.sleep(10 * DEADLINE_S)

        os.fsync = stuck  # type: ignore[assignment]
    rank.writer.start(info_of(2), state_of(2), nothing, *KEEP)
    if rank.rank == 0:
        rank.test.recv()
        ended = rank.writer.wait(0.5)
        until(lambda: rank.writer.missing_ranks == [1], "rank 0 does not know that rank 1 is missing")
        rank.test.send((ended, rank.writer.missing_ranks, rank.outcome(), rank.store.steps()))
    rank.leave()


def test_a_rank_is_killed_in_its_shard(tmp_path: Path, store: CheckpointStore) -> None:
    """The unfinished save never becomes visible. The survivor knows that it has not ended and which rank is missing,
    can save its state alone, and its process ends normally."""
    ranks = Ranks(tmp_path, 2, stuck_in_fsync)
    assert ranks.hear(1) == "stuck"
    ranks.kill(1)
    ranks.pipes[0].send("killed")
    assert ranks.hear(0) == (False, [1], None, [1])
    save_alone(store, info_of(2), state_of(2), 2, "rescue")
    assert ranks.leave() == [0, -signal.SIGKILL]
    assert_only_whole(store, 1, 2)
    assert store.manifest(2).shards == [shard_name(0, 1)] and store.manifest(2).world_size == 2


def waits_for_rank_0(rank: Rank) -> None:
    """Saves once; during the second save rank 0 hangs before its commit."""
    save([rank.writer], 1)

    def stuck() -> None:
        rank.test.send("stuck")
        time.sleep(10 * DEADLINE_S)

    rank.writer.start(info_of(2), state_of(2), stuck, *KEEP)
    if rank.rank == 1:
        rank.test.send("the first is committed")
        rank.test.recv()
        end(rank.writer)
        rank.test.send(rank.outcome())
    rank.leave()


def test_rank_0_is_killed_before_its_commit(tmp_path: Path, store: CheckpointStore) -> None:
    """The key-value store dies with it. The survivor learns that the save failed, and its process ends normally."""
    ranks = Ranks(tmp_path, 2, waits_for_rank_0)
    assert (ranks.hear(0), ranks.hear(1)) == ("stuck", "the first is committed")
    ranks.kill(0)
    ranks.pipes[1].send("killed")
    assert ranks.hear(1).startswith(f"{store.path(2)}: could not be written: ")
    assert ranks.leave() == [-signal.SIGKILL, 0]
    assert store.steps() == [1]
    store.recover()
    assert_only_whole(store, 1)


def test_a_stuck_writer_of_an_earlier_attempt(store: CheckpointStore) -> None:
    """A node that Slurm has given up may still write to the shared file system: two attempts that save the same step
    must not write into each other's files."""
    go_on = threading.Event()
    with writers(store, 1) as [earlier], writers(store, 1) as [later]:
        earlier.start(info_of(1), state_of(2), lambda: assert_set(go_on), *KEEP)
        save([later], 1)
        assert same(load(store.path(1), store.verify(1)), state_of(1))
        go_on.set()
        end(earlier)
    assert same(load(store.path(1), store.verify(1)), state_of(2))


def test_load_says_what_is_wrong(store: CheckpointStore) -> None:
    """A disk that fails after the verification must end neither in a traceback about pickles nor in weights that are
    half zeros."""
    with writers(store, 2) as ranks:
        save(ranks, 1)
    manifest, folder = store.manifest(1), store.path(1)
    for name in manifest.files:
        whole = (folder / name).read_bytes()
        for damaged in (whole[:-64], b"", whole + b"more", None):
            (folder / name).unlink()
            if damaged is not None:
                (folder / name).write_bytes(damaged)
            if name != "structure.pt" or damaged != whole + b"more":
                with pytest.raises(CheckpointError, match="step_000000001: could not be loaded"):
                    load(folder, manifest)
            (folder / name).write_bytes(whole)
    assert_only_whole(store, 1)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn]  # fmt: skip
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t.transpose(0, -1) if t.dim() else t,
    lambda t: t[..., ::2] if t.dim() else t,
    lambda t: t.expand(3, *t.shape),
    lambda t: t.unsqueeze(0).transpose(0, -1),
    lambda t: torch.nn.Parameter(t) if t.dtype.is_floating_point else t,
    lambda t: torch.nn.Parameter(t, requires_grad=False),  # is stored behind all others
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any dtype and layout with random bits, some of them views of a larger storage."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ceiling = 2 if dtype is torch.bool else 256
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    raw = torch.randint(ceiling, (count,), dtype=torch.uint8, generator=generator)
    return draw(st.sampled_from(LAYOUTS))(raw.view(dtype).reshape(shape))


STATES = st.recursive(
    tensors() | st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.lists(inner).map(tuple),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(st.data(), STATES)
def test_pack_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, state: Any) -> None:
    """Every bit of every tensor survives, wherever the bytes are split between ranks."""
    store = CheckpointStore(tmp_path_factory.mktemp("pack"))
    with writers(store, data.draw(st.integers(1, 4), "ranks")) as ranks:
        for writer in ranks:
            writer.start(info_of(1), state, nothing, *KEEP)
        for writer in ranks:
            end(writer)
        assert ranks[0].error is None
    assert same(load(store.path(1), store.verify(1)), state)

    packed = Packed(state)
    whole = torch.full((packed.bytes,), 7, dtype=torch.uint8)
    packed.copy(0, packed.bytes, whole)
    start = data.draw(st.integers(0, packed.bytes), "start")
    part = torch.full((data.draw(st.integers(start, packed.bytes), "stop") - start,), 8, dtype=torch.uint8)
    packed.copy(start, start + part.numel(), part)
    assert torch.equal(part, whole[start : start + part.numel()])


def test_large_tensors(store: CheckpointStore) -> None:
    """Threads read tensors in pieces, some of which span two shards: each must end up in its own place."""
    generator = torch.Generator().manual_seed(1)
    state = [torch.randn(count, generator=generator) for count in (3_000_000, 7, 2_000_001)]
    with writers(store, 3) as ranks:
        for writer in ranks:
            writer.start(info_of(1), state, nothing, *KEEP)
        for writer in ranks:
            end(writer)
    assert same(newest_state(store), state)


@settings(deadline=None)
@example(torch.ones(2)[::2])
@given(tensors())
def test_weights_of_any_layout(tensor: Tensor) -> None:
    """The fingerprint depends on the values only, not on their memory layout, and works for every layout."""
    tidy = tensor.detach().clone(memory_format=torch.contiguous_format)
    assert weights_sha256({"w": tensor}) == weights_sha256({"w": tidy})


class Buffers:
    """Stands in for `reusable_buffer`: notes who makes a buffer of which size, and waits until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        self.began, self.may = threading.Event(), threading.Event()
        self.error: Exception | None = None
        monkeypatch.setattr("laststep.checkpoint.writer.reusable_buffer", self.make)

    def make(self, count: int, device: torch.device) -> Tensor:
        self.made.append((threading.current_thread().name, count))
        self.began.set()
        assert self.may.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return torch.empty(count, dtype=torch.uint8)


def test_the_buffer_is_made_in_the_background(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin 12 GB takes seconds, in which no step is done. A save that comes earlier waits, and makes no second one:
    there may be no memory for two."""
    buffers = Buffers(monkeypatch)
    with writers(store, 2) as ranks:
        for rank in ranks:
            rank.prepare(state_of(1))
        assert buffers.began.wait(DEADLINE_S)
        saving = threading.Thread(target=save, args=(ranks, 2))
        saving.start()
        saving.join(0.2)
        assert saving.is_alive() and not store.steps(), "the save does not wait for its buffer"
        buffers.may.set()
        saving.join(DEADLINE_S)
        assert [name for name, _ in buffers.made] == ["saver", "saver"]
        assert sorted(rank.buffer_bytes for rank in ranks) == sorted(count for _, count in buffers.made)
    assert_only_whole(store, 2)


def test_a_buffer_that_cannot_be_made(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread serves on, and the first save says what is wrong."""
    buffers = Buffers(monkeypatch)
    buffers.error = MemoryError("no memory")
    buffers.may.set()
    with writers(store, 1) as (rank,):
        rank.prepare(state_of(1))
        end(rank)
        with pytest.raises(MemoryError):
            save([rank], 1)
        buffers.error = None
        save([rank], 2)
    assert_only_whole(store, 2)


@pytest.mark.parametrize("kind", ["lustre", "another"])
def test_each_rank_syncs_its_file_and_on_lustre_no_folder(
    store: CheckpointStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ranks that each have the metadata server commit all it has would stop it. But a name that no rank
    syncs is lost in a power cut, together with the checkpoint."""
    monkeypatch.setattr(store_module, "_kind", lambda path: LUSTRE if kind == "lustre" else 0)
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    with writers(store, 4) as ranks:
        monkeypatch.setattr(os, "fsync", fsync)
        save(ranks, 5)
    writing = next(name for name in synced if name.startswith(".writing-"))
    names = {"structure.pt", MANIFEST, *(shard_name(number, 4) for number in range(4))}
    by_ranks = 0 if kind == "lustre" else 5  # one after each file
    assert {name: synced.count(name) for name in (*names, writing)} == {
        **dict.fromkeys(names, 1),
        writing: by_ranks + 1,
    }
    assert synced.index(MANIFEST) < len(synced) - 1 - synced[::-1].index(writing) < synced.index("checkpoints")


def test_the_kind_of_a_file_system() -> None:
    """statfs(2) is right: proc has a number of its own."""
    assert store_module._kind(Path("/proc/self/stat")) == 0x9FA0
    assert store_module._kind(Path("/no/such/folder")) == 0


def test_only_ranks_that_write_touch_the_folder(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small state is written by one rank. A thousand others must not create its folder a thousand times."""
    created: list[str] = []
    mkdir = os.mkdir

    def counted(path: Path, mode: int = 0o777) -> None:
        created.append(path.name.partition("-step")[0])
        mkdir(path, mode)

    with writers(store, 4) as ranks:
        monkeypatch.setattr(files, "STRIPE_BYTES", 64 << 20)
        monkeypatch.setattr(os, "mkdir", counted)
        save(ranks, 5)
        save(ranks, 6)
    assert created == [".writing", "checkpoints", ".writing", ".writing"]

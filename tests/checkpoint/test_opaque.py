"""OpaqueFiles: what a framework has written by itself is committed whole or not at all, and never handed back damaged.

The ranks are threads of this process, each with its own writer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from laststep.checkpoint import files, opaque
from laststep.checkpoint.manager import CheckpointManager, Position
from laststep.checkpoint.opaque import OpaqueFiles, Share, reporting_growth
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.config.errors import ConfigError
from laststep.config.schema import Checkpoint
from laststep.ranks.group import Group, PeerLost
from laststep.ranks.seal import Seal
from laststep.ranks.world import World
from tests.checkpoint.test_restore import flip, together
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import a_world

CPU = torch.device("cpu")
Write = Callable[[int, Path], object]  # what the framework does on a rank


class Keys(dist.HashStore):  # type: ignore[misc]
    """Ends the waiting of all ranks once one of them has failed."""

    failed = False

    def check(self, keys: list[str]) -> bool:
        assert not self.failed, "another rank has failed"
        return bool(super().check(keys))


class Ranks:
    """The ranks of one attempt, on these hosts."""

    def __init__(self, store: CheckpointStore, write: Write, hosts: tuple[str, ...] = ("here", "here")) -> None:
        self.store, self.hosts, self.keys, self.seal = store, hosts, Keys(), Seal()
        self.shares: list[list[str]] = [[] for _ in hosts]
        self.active = 0
        self.writers = [CheckpointWriter(store, self.keys, rank, len(hosts), CPU) for rank in range(len(hosts))]
        self.files = [self._opaque(a_world(rank, len(hosts), hosts=hosts), write) for rank in range(len(hosts))]

    def _opaque(self, world: World, write: Write) -> OpaqueFiles:
        group = Group(world, self.keys, CPU, seal=self.seal)
        return OpaqueFiles(lambda folder: write(world.rank, folder), group, self._check_alive, self._note)

    def _note(self) -> None:
        self.active += 1

    def _check_alive(self, missing: list[int]) -> None:
        raise PeerLost(f"missing: {missing}")

    def save(self, step: int, keep_last: int = 9) -> list[str | None]:
        """All ranks save; returns why it was not committed, as each rank knows it. Raises what a rank raises."""
        info, state = CheckpointInfo(step, 1, step, {}), {"position": {"step": step}}
        shares = [save.result() for save in self.framework_saves(step)]
        self.shares = [list(share.names) for share in shares]
        for writer, share in zip(self.writers, shares):
            writer.start(info, state, lambda: None, keep_last, 0, opaque=share)
        assert all(writer.wait(DEADLINE_S) for writer in self.writers), "no end of the save"
        return [None if writer.error is None else str(writer.error) for writer in self.writers]

    def framework_saves(self, step: int) -> list[Future[Share]]:
        """The framework has written on all ranks at the same time, or a rank has failed."""

        def on(rank: int) -> Share:
            try:
                return self.files[rank].save(self.writers[rank].next_folder(step))
            except Exception as error:
                self.keys.failed |= not isinstance(error, ConfigError)  # which all ranks raise
                raise

        with ThreadPoolExecutor(len(self.hosts)) as pool:
            return [pool.submit(on, rank) for rank in range(len(self.hosts))]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def several(rank: int, folder: Path) -> None:
    """Files with all kinds of names; of no two ranks the same."""
    (folder / f"deep/{rank}").mkdir(parents=True, exist_ok=True)
    for name in ("plain.bin", "manifest.json", ".hidden", "a b\nc", os.fsdecode(b"\xff\xfe"), f"deep/{rank}/x"):
        (folder / name).parent.joinpath(f"{Path(name).name}-{rank}").write_bytes(name.encode("utf8", "replace") * rank)


def nothing_extra(store: CheckpointStore, *steps: int) -> None:
    """These checkpoints are there, intact, and nothing else is in the folder."""
    assert sorted(path.name for path in store.folder.iterdir()) == [store.path(step).name for step in steps]
    for step in steps:
        store.verify(step)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_all_files_are_committed(store: CheckpointStore) -> None:
    """Whatever their names, and also empty ones: a resume that lacks one might not even notice. Each is hashed once."""
    ranks = Ranks(store, several)
    assert ranks.save(3) == [None, None]
    there = {f"opaque/{path.relative_to(store.path(3) / 'opaque')}" for path in files_below(store.path(3) / "opaque")}
    assert len(there) == 12 and store.manifest(3).opaque.keys() == there
    hashed = [name for share in ranks.shares for name in share]
    assert sorted(hashed) == sorted(there) and all(ranks.shares), "by both ranks"
    assert ranks.active >= 6, "each read of a file that is not empty shows that the save gets on"
    ranks.close()
    nothing_extra(store, 3)
    done = together(2, lambda rank: (rank.read(store), rank.progress)[1])
    assert done[0] == done[1] > 3, "the watchdog would name the rank with less progress"


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_damage_makes_all_ranks_fall_back(store: CheckpointStore) -> None:
    """The framework would load a damaged file, or half of a set, without a word. All take the newest whole one."""
    ranks = Ranks(store, several)
    for step in (3, 5, 7, 9):
        assert ranks.save(step) == [None, None]
    ranks.close()
    flip(store, 9, "opaque/deep/1/x-1")
    (store.path(7) / "opaque/plain.bin-1").unlink()
    with (store.path(5) / "opaque/plain.bin-1").open("ab") as file:
        file.write(b"more")

    def restores(rank: Any) -> tuple[int, list[str]]:
        checkpoint = rank.read(store)
        assert checkpoint is not None
        assert checkpoint.load({}, rank.advance) == {}
        return checkpoint.manifest.step, rank.warnings

    (zero, said), (one, _) = together(2, restores)
    assert zero == one == 3
    assert said == [
        "skipped step_000000009: opaque/deep/1/x-1 differs from its SHA-256 in the manifest",
        "skipped step_000000007: opaque/plain.bin-1 is missing",
        "skipped step_000000005: opaque/plain.bin-1 has 13 bytes, its manifest says 9",
    ]


def test_a_node_that_cannot_read_a_file(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 can: a fault of one node must not set the run back."""
    ranks = Ranks(store, several)
    ranks.save(3)
    ranks.close()
    real, failed = files._hash, list[str]()

    def fails_once(path: Path, *more: Any, **named: Any) -> Any:
        if path.name == "x-1" and not failed:
            failed.append(path.name)
            raise OSError(116, "Stale file handle")
        return real(path, *more, **named)

    monkeypatch.setattr(files, "_hash", fails_once)
    monkeypatch.setattr(
        "laststep.checkpoint.restore.shares", lambda manifest, size: {n: int("/" in n) for n in manifest.files}
    )
    checkpoints = together(2, lambda rank: (rank.read(store), rank.warnings))
    assert [checkpoint.manifest.step for checkpoint, _ in checkpoints] == [3, 3]
    assert checkpoints[0][1] == [
        "WARNING: step 3: opaque/deep/1/x-1 cannot be read: Stale file handle on rank 1 on here; rank 0 can read it"
    ]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "run.checkpoint(): save(folder) has written nothing into its folder"),
        ("folders", "run.checkpoint(): save(folder) has written nothing into its folder"),
        ("outside", "'link', which is a link to '../../outside'; only a relative link to a file in the folder can"),
        ("absolute", "'link', which is a link to '{}'; only a relative link"),
        ("broken", "'link', which is a link to 'nowhere'; only a relative link"),
        ("folder link", "'link', which is a link to 'sub'; only a relative link"),
        ("pipe", "'sub/pipe', which is neither a file nor a folder"),
    ],
)
def test_what_cannot_be_kept_is_refused(store: CheckpointStore, tmp_path: Path, what: str, message: str) -> None:
    """At the first save, on every rank, in one line: a link to a file elsewhere would be a checkpoint without its
    weights, and one with an absolute path breaks when the folder is renamed."""
    store.folder.mkdir()
    (store.folder / "outside").touch()

    def write(rank: int, folder: Path) -> None:
        if rank == 0 or what == "nothing":
            return
        (folder / "sub").mkdir()
        if what == "pipe":
            os.mkfifo(folder / "sub/pipe")
        if what in ("outside", "broken", "folder link"):
            targets = {"outside": "../../outside", "broken": "nowhere", "folder link": "sub"}
            (folder / "link").symlink_to(targets[what])
        if what == "absolute":
            (folder / "real").touch()
            (folder / "link").symlink_to(folder / "real")

    ranks, errors = Ranks(store, write), []
    for save in ranks.framework_saves(3):
        with pytest.raises(ConfigError) as error:
            save.result()
        errors.append(str(error.value))
    ranks.close()
    (writing,) = (path for path in store.folder.iterdir() if path.is_dir())
    expected = message.format(writing / "opaque/real")
    assert expected in errors[0] and errors[0] == errors[1]
    store.recover()
    assert store.steps() == [] and list(store.folder.iterdir()) == [store.folder / "outside"]


def test_links_within_the_folder_are_kept(store: CheckpointStore) -> None:
    """Some frameworks link to the newest file. The link leads there after the commit, and its file is checked."""

    def write(rank: int, folder: Path) -> None:
        if rank == 1:
            (folder / "sub").mkdir()
            (folder / "sub/real").write_text("weights")
            (folder / "last").symlink_to("sub/real")

    ranks = Ranks(store, write)
    assert ranks.save(3) == [None, None]
    ranks.close()
    assert (store.path(3) / "opaque/last").read_text() == "weights"
    assert store.manifest(3).opaque.keys() == {"opaque/last", "opaque/sub/real"}


def test_nodes_that_see_different_files(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may show a node an old list of a folder: each file is hashed where it has been seen, and
    none is missing from the checkpoint."""
    views, real = {0: "2", 2: "01"}, opaque._files
    lists = iter(sorted(views))
    lock = threading.Lock()

    def seen(folder: Path) -> Any:
        with lock:
            hidden = views[next(lists)]
        return [(path, size) for path, size in real(folder) if path.name not in hidden]

    monkeypatch.setattr(opaque, "_files", seen)
    ranks = Ranks(store, lambda rank, folder: (folder / str(rank)).write_text("x" * rank), ("n0", "n0", "n1", "n1"))
    assert ranks.save(3) == [None] * 4
    ranks.close()
    assert store.manifest(3).opaque.keys() == {f"opaque/{rank}" for rank in range(4)}
    hosts = {name: ranks.hosts[rank] for rank, names in enumerate(ranks.shares) for name in names}
    alone = [hosts["opaque/2"], hosts["opaque/0"], hosts["opaque/1"]]
    assert alone[1] == alone[2] != alone[0], "by a rank that can read it"


def test_a_rank_that_dies_in_its_save(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is done, and waits in no collective that would break: it must look whether the others live."""
    monkeypatch.setattr(opaque, "MISSING_S", 0.05)
    ranks = Ranks(store, lambda rank, folder: (folder / "x").touch())
    with pytest.raises(PeerLost, match=r"missing: \[1\]"):
        ranks.files[0].save(ranks.writers[0].next_folder(3))
    ranks.close()
    store.recover()
    assert list(store.folder.iterdir()) == []


def test_a_file_that_cannot_be_read_back(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails on every rank and leaves nothing; the next one succeeds."""
    ranks, real = Ranks(store, several), files._hash
    monkeypatch.setattr(files, "_hash", Mock(side_effect=OSError(5, "Input/output error")))
    assert all("Input/output error" in str(error) for error in ranks.save(3))
    assert list(store.folder.iterdir()) == []
    monkeypatch.setattr(files, "_hash", real)
    assert ranks.save(4) == [None, None]
    ranks.close()
    nothing_extra(store, 4)


def test_old_ones_are_deleted(store: CheckpointStore) -> None:
    """With all their folders."""
    ranks = Ranks(store, several)
    for step in (3, 5, 7):
        assert ranks.save(step, keep_last=2) == [None, None]
    ranks.close()
    nothing_extra(store, 5, 7)


def test_the_end_of_an_attempt_does_not_wait_for_hashes(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault must not hold the nodes until hundreds of gigabytes have been read: the read in progress is the last."""
    monkeypatch.setattr(files, "READ_BYTES", 1)
    reading = threading.Event()

    def slowly() -> None:
        reading.set()
        time.sleep(0.01)

    monkeypatch.setattr(Ranks, "_note", lambda self: slowly())
    ranks = Ranks(store, lambda rank, folder: (folder / str(rank)).write_bytes(bytes(100_000)))
    saving = threading.Thread(target=ranks.save, args=(3,))
    saving.start()
    assert reading.wait(DEADLINE_S)
    ranks.close()
    saving.join(DEADLINE_S)
    assert not saving.is_alive() and store.steps() == []


def test_growth_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework may write for an hour in one call of C: its files show that it is at work, and when it hangs."""
    monkeypatch.setattr(opaque, "LOOK_S", 0.005)
    grown: list[float] = []
    with reporting_growth(tmp_path, lambda: grown.append(time.monotonic())):
        for number in range(3):
            before = len(grown)
            with (tmp_path / "sub").open("ab") as file:
                file.write(b"x")
            wait_until(lambda: len(grown) > before, f"the growth was not noticed, {number}")  # noqa: B023
        time.sleep(0.1)
        assert len(grown) <= 7, "nothing grows any more"


def test_the_interval_knows_what_a_save_costs(store: CheckpointStore) -> None:
    """Training waits while the framework writes. If only our own work counted, a run would save far too often."""
    store.folder.mkdir()
    progress = Mock()
    progress.since_restart.return_value = (1, 0.001)
    group = Group(a_world(), dist.HashStore(), CPU)
    run, watch = Mock(attempts=store.folder / "none"), Mock(activity=0)
    saves = CheckpointManager(
        Checkpoint(every_minutes="auto"), run, store, group, Mock(), progress, watch, lambda: False
    )

    def write(folder: Path) -> None:
        time.sleep(0.25)
        (folder / "x").touch()

    saves.add_opaque(write)
    saves.start_save(Position(step=1), CheckpointInfo(1, 1, 1, {}), {"position": {"step": 1}})
    saves.wait()
    saves.poll()
    saves.close()
    (said,) = [call.args[0] for call in progress.say.call_args_list if "a save costs" in call.args[0]]
    assert float(said.split("a save costs ")[1].split(" s")[0]) >= 0.25, said
    assert 0.25 <= saves.stalled_s < 2, "what `status` counts as saves"

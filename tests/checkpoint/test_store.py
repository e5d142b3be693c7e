"""CheckpointStore: a checkpoint is complete or absent, and the last good one is never lost.

After a crash this is all that a run has: to load a damaged checkpoint, or to skip or delete a good one, would throw
away days of training.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.checkpoint.files import CheckpointError, FileEntry, Patience
from laststep.checkpoint.store import CheckpointGone, CheckpointStore, Manifest
from laststep.config.errors import DiskError
from laststep.rundir import fsync
from tests.support.disk import acting_at, failing_at, refusing
from tests.support.project import DEADLINE_S

STATE = bytes(range(256)) * 20
FIRST, SECOND = "shard_0000-of-0002.bin", "shard_0001-of-0002.bin"


class Crash(BaseException):
    """A power cut: a BaseException, so that no handler in the code under test catches it."""


def damage(data: bytes) -> Callable[[Path], None]:
    """A function that replaces a checkpoint's manifest by `data`."""

    def damage_it(path: Path) -> None:
        (path / "manifest.json").write_bytes(data)

    return damage_it


def write(store: CheckpointStore, step: int, state: bytes = STATE, **metrics: float) -> Path:
    """Commit a checkpoint of `state` in two shards."""
    writing, half = store.writing_folder(step, "test"), len(state) // 2
    files: dict[str, FileEntry] = {}
    try:
        store.create_writing_folder(step, "test")
        for name, data in {"structure.pt": b"structure", FIRST: state[:half], SECOND: state[half:]}.items():
            (writing / name).write_bytes(data)
            fsync(writing / name)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    except OSError as error:
        store.discard(writing)
        raise store.write_error(step, error) from error
    return store.commit(writing, Manifest(step, 1 + step // 10, 8 * step, 2, metrics, files))


def read(store: CheckpointStore) -> tuple[int, bytes] | None:
    """Step and state of the checkpoint that a resume would load."""
    newest = store.newest(lambda text: None)
    if newest is None:
        return None
    return newest.step, b"".join((store.path(newest.step) / name).read_bytes() for name in newest.shards)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_write_and_read(store: CheckpointStore) -> None:
    """A committed checkpoint is found, verifies, and describes itself."""
    assert store.steps() == [] and read(store) is None
    write(store, 3, val_loss=0.5)
    path = write(store, 12, b"newer")
    assert store.steps() == [3, 12] and store.path(12) == path
    manifest = store.verify(12)
    assert (manifest.step, manifest.epoch, manifest.samples, manifest.world_size) == (12, 2, 96, 2)
    assert manifest.bytes == len(b"structure") + len(b"newer")
    assert store.verify(3).metrics == {"val_loss": 0.5}
    assert read(store) == (12, b"newer")
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_000000003", "step_000000012"]


@pytest.mark.parametrize("step", [5, 7], ids=["same-step", "next-step"])
@pytest.mark.parametrize("error", [Crash(), OSError("no space left on device")], ids=["crash", "disk"])
def test_fails_anywhere(step: int, error: BaseException, tmp_path: Path) -> None:
    """A power cut or a full disk at each disk call: afterwards the old or the new checkpoint is there, intact.

    A step is written twice when a run was stopped before a validation and saves again after it.
    """
    for call in range(1000):
        store = CheckpointStore(tmp_path / str(call))
        write(store, 5, b"old")
        ended = "returned"
        with failing_at(call, error) as calls:
            try:
                write(store, step, b"new")
            except (Crash, CheckpointError) as failure:
                ended = type(failure).__name__
        store.recover()
        assert read(store) in ([(step, b"new")] if ended == "returned" else [(5, b"old"), (step, b"new")])
        assert not [path for path in store.folder.iterdir() if not path.name[5:].isdigit()], "nothing is left over"
        write(store, step, b"again")
        assert read(store) == (step, b"again")
        if len(calls) <= call:
            assert ended == "returned"
            assert call > 8, "the disk calls were seen"
            return
    raise AssertionError("a commit takes a thousand disk calls")


def test_fails_twice(tmp_path: Path) -> None:
    """The next attempt may be interrupted in its clean-up too, at any call: the one after it still has everything."""
    for first in range(1000):
        for second in range(1000):
            store = CheckpointStore(tmp_path / f"{first}-{second}")
            write(store, 5, b"old")
            with failing_at(first, Crash()) as calls, suppress(Crash):
                write(store, 5, b"new")
            with failing_at(second, Crash()) as recover_calls, suppress(Crash):
                store.recover()
            store.recover()
            assert read(store) in [(5, b"old"), (5, b"new")]
            if len(recover_calls) <= second:
                break
        if len(calls) <= first:
            return


def truncate(path: Path) -> None:
    os.truncate(path / SECOND, len(STATE) // 2 - 1)


def flip(path: Path) -> None:
    data = bytearray((path / SECOND).read_bytes())
    data[100] ^= 1
    (path / SECOND).write_bytes(data)


def other_manifest(**fields: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | fields))

    return damage


def without_a_shard(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][SECOND]
    (path / "manifest.json").write_text(json.dumps(manifest))


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("truncated", truncate, f"{SECOND} has 2559 bytes, its manifest says 2560"),
    ("bit-flipped", flip, f"{SECOND} differs from its SHA-256 in the manifest"),
    ("emptied", lambda path: os.truncate(path / SECOND, 0), f"{SECOND} has 0 bytes"),
    ("no-shard", lambda path: (path / SECOND).unlink(), f"{SECOND} is missing"),
    ("no-structure", lambda path: (path / "structure.pt").unlink(), "structure.pt is missing"),
    ("no-manifest", lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    ("half-deleted", empty, "manifest.json is missing"),
    ("manifest-empty", damage(b""), "manifest.json cannot be read"),
    ("manifest-cut", damage(b'{"step": 7, "ep'), "manifest.json cannot be read"),
    ("manifest-zeros", damage(b"\0" * 100), "manifest.json cannot be read"),
    ("manifest-list", damage(b"[]"), "manifest.json cannot be read"),
    ("manifest-of-another-step", other_manifest(step=6), "manifest.json does not describe step 7"),
    ("manifest-without-files", other_manifest(files={}), "manifest.json does not describe step 7"),
    ("manifest-with-a-list-of-files", other_manifest(files=[]), "manifest.json does not describe step 7"),
    ("manifest-without-a-shard", without_a_shard, "manifest.json does not describe step 7"),
    ("format", other_manifest(format=99), "its format is 99, this version of Laststep reads formats 2 to 4"),
    ("unknown-field", other_manifest(colour=3), "manifest.json cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_damaged_is_skipped(damage: Callable[[Path], None], says: str, store: CheckpointStore) -> None:
    """The newest intact checkpoint is taken, and the reason reported: a silent skip would hide a dying disk."""
    write(store, 3, b"good")
    write(store, 7)
    damage(store.path(7))
    warnings: list[str] = []
    newest = store.newest(warnings.append)
    assert newest is not None and newest.step == 3
    assert len(warnings) == 1 and warnings[0].startswith(f"skipped step_000000007: {says}")
    with pytest.raises(CheckpointError, match=says.split(",")[0]):
        store.verify(7)


def test_all_damaged(store: CheckpointStore) -> None:
    """If all checkpoints are damaged the run starts from scratch, with a warning for each of them."""
    for step in (1, 2, 3):
        truncate(write(store, step))
    warnings: list[str] = []
    assert store.newest(warnings.append) is None
    assert [text.split(":")[0] for text in warnings] == [f"skipped step_00000000{step}" for step in (3, 2, 1)]


def test_foreign_names_are_no_checkpoints(store: CheckpointStore) -> None:
    """Other files and folders, from a user or the file system, are neither loaded nor deleted."""
    write(store, 3)
    for name in ("step_", "step_x", "mine", ".nfs0001", "step_000000003.bak"):
        (store.folder / name).mkdir()
    store.recover()
    store.prune(3, 1, 0)
    assert store.steps() == [3]
    assert len(list(store.folder.iterdir())) == 6


@pytest.mark.parametrize("part", range(4))
def test_manifest_bit_flips(store: CheckpointStore, part: int) -> None:
    """Whichever bit of a manifest flips, a resume finds an intact checkpoint and never ends in a traceback. Each part
    has two bits of every byte."""
    write(store, 3, b"good")
    path = write(store, 7, val_loss=0.5) / "manifest.json"
    data = path.read_bytes()
    for bit in (bit for bit in range(8 * len(data)) if bit % 4 == part):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert read(store) in [(3, b"good"), (7, STATE)]


def test_unreadable_is_skipped(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error in one file does not make the other checkpoints useless."""
    write(store, 3, b"good")
    bad = write(store, 7) / SECOND
    real = Path.open

    def broken(self: Path, *words: Any, **named: Any) -> Any:
        if self == bad:
            raise OSError(5, "Input/output error")
        return real(self, *words, **named)

    monkeypatch.setattr(Path, "open", broken)
    newest = store.newest(lambda text: None)
    assert newest is not None and newest.step == 3


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.integers(0, 30), st.tuples(st.none() | st.floats(0, 9), st.sampled_from("wwwwsm")), max_size=7),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_prune(found: dict[int, tuple[float | None, str]], keep_last: int, keep_best: int) -> None:
    """After a save, no matter what was damaged before, the newest and best checkpoints remain, one of them intact."""
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        intact: dict[int, float | None] = {}
        for step, (loss, condition) in found.items():
            path = write(store, step, b"x", **({} if loss is None else {"val_loss": loss}))
            if condition == "s":
                (path / SECOND).unlink()
            elif condition == "m":
                (path / "manifest.json").unlink()
            else:
                intact[step] = loss
        write(store, 31, b"just saved")
        intact[31] = None
        store.prune(31, keep_last, keep_best)
        left = store.steps()
        assert read(store) == (31, b"just saved")
        assert set(sorted(intact)[-keep_last:]) <= set(left)
        best = sorted((loss, step) for step, loss in intact.items() if loss is not None)[:keep_best]
        assert {step for _, step in best} <= set(left)
        if len(intact) >= keep_last:
            oldest = sorted(intact)[-keep_last]
            assert all(step >= oldest or step in [s for _, s in best] for step in left), "and nothing else stays"


def test_prune_is_cut_off(tmp_path: Path) -> None:
    """A power cut during a deletion leaves half a checkpoint, which must not be loaded."""
    for call in range(100):
        store = CheckpointStore(tmp_path / str(call))
        for step in (1, 2, 3):
            write(store, step)
        with failing_at(call, Crash()) as calls, suppress(Crash):
            store.prune(3, 1, 0)
        assert read(store) == (3, STATE)
        store.prune(3, 1, 0)
        assert store.steps() == [3]
        if len(calls) <= call:
            return
        shutil.rmtree(store.folder)


def test_a_checkpoint_that_the_run_deletes_is_not_damaged(tmp_path: Path) -> None:
    """A run that trains deletes old checkpoints while `verify` reads them. Between whichever calls of the reader the
    deletion falls, the checkpoint must not be called damaged: a user would throw away a good run."""
    for call in range(100):
        store = CheckpointStore(tmp_path / str(call))
        for step in (1, 2, 3):
            write(store, step)
        with acting_at(call, lambda store=store: store.prune(3, 1, 0)) as calls:  # type: ignore[misc]
            try:
                assert store.verify(1).step == 1
            except CheckpointError as error:
                assert isinstance(error, CheckpointGone), f"before call {call}: {error}"
        if len(calls) <= call:
            assert call > 3, "the reader was never interrupted"
            return
    raise AssertionError("the reader makes more calls than this test covers")


def test_the_newest_one_while_the_run_goes_on(tmp_path: Path) -> None:
    """`submit --from` copies the newest checkpoint of a run that trains, which may save two more and delete all that
    were listed, between whichever calls of the reader. There is always a newest one, and nothing to warn of."""
    for call in range(100):
        store = CheckpointStore(tmp_path / str(call))
        warned: list[str] = []
        write(store, 1)
        write(store, 2)

        def goes_on(store: CheckpointStore = store) -> None:
            for step in (3, 4):
                write(store, step)
                store.prune(step, 1, 0)

        with acting_at(call, goes_on) as calls:
            found = store.newest(warned.append)
        assert found is not None and found.step in (2, 4) and not warned, f"before call {call}"
        if len(calls) <= call:
            return
    raise AssertionError("the reader makes more calls than this test covers")


def test_a_loss_that_is_no_number_is_not_the_best(store: CheckpointStore) -> None:
    """A run that has diverged must not keep the diverged weights as its best and delete the good ones."""
    write(store, 1, val_loss=float("nan"))
    write(store, 2, val_loss=0.5)
    write(store, 3, val_loss=float("nan"))
    write(store, 4, val_loss=0.9)
    store.prune(4, 1, 1)
    assert store.steps() == [2, 4]


def test_a_damaged_newer_one_does_not_count_as_kept(store: CheckpointStore) -> None:
    """A resume that skipped a damaged checkpoint saves at an earlier step. That save is the newest good one. If the
    damaged one counted as the newest, short attempts would never get past it."""
    write(store, 7)
    truncate(write(store, 24, val_loss=0.1))
    write(store, 9, b"after the resume", val_loss=0.5)
    store.prune(9, 1, 1)
    assert read(store) == (9, b"after the resume")
    assert 7 not in store.steps()


PASSING = [errno.ESTALE, errno.EACCES, errno.EIO, errno.ETIMEDOUT]


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_listed_is_not_empty(number: int, store: CheckpointStore) -> None:
    """A stale handle, or a server that is away. Read as "no checkpoint", it restarted the run from step 0."""
    write(store, 7)
    warned: list[str] = []
    looks: list[Callable[[], object]] = [
        store.steps,
        store.recover,
        lambda: store.newest(warned.append),
        lambda: list(store.candidates(warned.append)),
        lambda: store.prune(7, 1, 0),
    ]
    for look in looks:
        with refusing(store.folder, number), pytest.raises(DiskError, match="checkpoints: cannot be listed: "):
            look()
    assert store.steps() == [7] and not warned


def test_a_link_to_a_disk_that_is_not_mounted(tmp_path: Path) -> None:
    """Users put checkpoints on a scratch disk. Without it there is no folder, which looks like that of a new run."""
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == []
    store.folder.symlink_to(tmp_path / "scratch")
    with pytest.raises(DiskError, match=f"leads to {tmp_path / 'scratch'}, which is not there"):
        store.steps()
    (tmp_path / "scratch").mkdir()
    assert store.steps() == []


@pytest.mark.parametrize("name", ["", "manifest.json", FIRST], ids=["folder", "manifest", "shard"])
@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_checkpoint_that_the_disk_does_not_show_right_now(name: str, number: int, store: CheckpointStore) -> None:
    """It is not damaged. An older one would set the run back, and what the newer steps wrote would be cut off."""
    write(store, 3)
    file = write(store, 7) / name
    warned: list[str] = []
    with refusing(file, number, times=1 if name else 2):  # what `path` is refused changes nothing
        newest = next(store.candidates(warned.append, patience=Patience(DEADLINE_S, warned.append)))
    assert newest.step == 7 and not store.damaged
    assert len(warned) == 1 and "looking again for " in warned[0]


def test_a_disk_that_fails_long_after_the_newest_was_found(store: CheckpointStore) -> None:
    """The newest one was read meanwhile, for minutes, and is damaged. An error that passes must not cost the one before
    it, too."""
    write(store, 3)
    manifest, warned = write(store, 5) / "manifest.json", list[str]()
    write(store, 7)
    patience = Patience(DEADLINE_S, warned.append)
    found = store.candidates(warned.append, patience=patience)
    assert next(found).step == 7
    patience._deadline = 0.0  # they have passed
    with refusing(manifest, errno.EIO, times=1):
        assert next(found).step == 5 and not store.damaged


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_checkpoint_that_the_disk_does_not_show_at_all(number: int, store: CheckpointStore) -> None:
    """What the disk has lost is skipped, as always. Any other error says nothing about the checkpoint."""
    write(store, 3)
    manifest = write(store, 7) / "manifest.json"
    warned: list[str] = []
    with refusing(manifest, number):
        if number == errno.EIO:
            assert next(store.candidates(warned.append)).step == 3 and store.damaged == {7}
            assert warned == ["skipped step_000000007: manifest.json cannot be read: Input/output error"]
        else:
            with pytest.raises(DiskError, match=r"step_000000007: manifest.json cannot be read: "):
                next(store.candidates(warned.append))
            assert not warned


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["manifest.json", FIRST])
def test_pruning_while_the_disk_does_not_show_the_best_one(number: int, name: str, store: CheckpointStore) -> None:
    """The best weights of the run were deleted for one stale handle."""
    write(store, 1, val_loss=0.1)
    for step in (2, 3, 4):
        write(store, step, val_loss=0.5)
    with refusing(store.path(1) / name, number):
        store.prune(4, 1, 1)
    assert store.steps() == [1, 2, 4], "the best of those that it can see stays, too"
    store.prune(4, 1, 1)
    assert store.steps() == [1, 4]


def test_pruning_while_the_disk_does_not_show_the_newest(store: CheckpointStore) -> None:
    """It cannot count: an older one stays in its place."""
    for step in (1, 2, 3):
        write(store, step)
    with refusing(store.path(2) / "manifest.json", errno.ESTALE):
        store.prune(3, 2, 0)
    assert store.steps() == [1, 2, 3]


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_one_does_not_count_among_the_newest(damage: Callable[[Path], None], store: CheckpointStore) -> None:
    """keep_last=2 is for the day on which the newest turns out to be damaged. The run has continued past the one that
    its resume skipped: that one must not push out the last good one."""
    write(store, 7)
    damage(write(store, 24))
    newest = store.newest(lambda text: None)
    assert newest is not None and newest.step == 7
    write(store, 30)
    store.prune(30, 2, 0)
    assert store.steps() == [7, 24, 30]
    write(store, 24)  # the same step again, good this time
    store.prune(30, 2, 0)
    assert store.steps() == [24, 30]


@pytest.mark.parametrize("step", [5, 7])
def test_a_commit_that_cannot_be_undone(step: int, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails while a checkpoint is replaced: the old one stays under its other name until the next attempt.
    Whoever looks meanwhile, such as the batch shell, would count the steps up to it as lost."""
    write(store, 3)
    write(store, 5, b"old", val_loss=0.1)
    real, renames = os.rename, 0

    def fails_after_the_first(*words: Any, **named: Any) -> None:
        nonlocal renames
        renames += 1
        if renames > 1:
            raise OSError(errno.EIO, "Input/output error")
        real(*words, **named)

    monkeypatch.setattr(os, "rename", fails_after_the_first)
    with pytest.raises(CheckpointError):
        write(store, 5, b"new")
    monkeypatch.undo()
    assert (store.folder / "step_000000005.replaced").exists() and not (store.folder / "step_000000005").exists()
    assert store.steps() == [3, 5] and read(store) == (5, b"old") and store.is_intact(5)
    assert [manifest.step for manifest in store.candidates(print)] == [5, 3]
    write(store, step, b"next")
    store.prune(step, 1, 1)
    assert read(store) == (step, b"next") and store.steps() == sorted({5, step})
    store.recover()
    assert read(store) == (step, b"next")
    assert sorted(path.name for path in store.folder.iterdir()) == [
        f"step_00000000{each}" for each in sorted({5, step})
    ]

"""Weights that training does not change are on the disk twice, however many checkpoints hold them, and cannot be lost.

A link that hides other bytes, a link to a file that is gone, or one damaged file in both of the newest checkpoints
would cost the run; a link that is not made costs the disk as many bytes as the model has, in each save.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laststep.checkpoint import files
from laststep.checkpoint.export import read_run
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import FIXED_FORMAT, STRUCTURE, CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.ranks.world import ShardPlace
from laststep.rundir import RunDir
from tests.checkpoint.test_restore import flip
from tests.checkpoint.test_writer import end, info_of, nothing, same, until
from tests.support.disk import acting_at, failing_at
from tests.support.ranks import train
from tests.support.runs import config
from tests.support.states import places, pretended_rank, save_alone, sharded

CPU = torch.device("cpu")
FROZEN = 20_480  # bytes


def state_of(step: int, frozen: int = 0) -> dict[str, Any]:
    """Adapters beside frozen weights, in the order in which a model has them; the adapters differ at each step."""
    draws, fixed = torch.Generator().manual_seed(step + 1), torch.Generator().manual_seed(frozen)
    model: dict[str, Any] = {}
    for layer in range(2):
        base = torch.randn(FROZEN // 80, 10, generator=fixed)
        model[f"{layer}.base"] = nn.Parameter(base, requires_grad=False)
        model[f"{layer}.adapter"] = nn.Parameter(torch.randn(10, 4, generator=draws))
    return {"position": {"step": step}, "model": model, "optimizer": {"m": torch.randn(30, generator=draws), "lr": 0.1}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    monkeypatch.setattr(files, "STRIPE_BYTES", FROZEN // 2)  # so that ranks share these weights
    return CheckpointStore(tmp_path / "checkpoints")


class Attempt:
    """The writers of all ranks of one attempt, in this process."""

    def __init__(self, store: CheckpointStore, shards: int = 1, replicas: int = 1, keep_last: int = 9) -> None:
        self.store, self.keep_last, self.places = store, keep_last, places(shards, replicas)
        keys, size = dist.HashStore(), shards * replicas
        self.writers = [CheckpointWriter(store, keys, rank, size, CPU, p) for rank, p in enumerate(self.places)]

    def start(self, step: int, state: Any = None) -> None:
        for writer, place in zip(self.writers, self.places):
            writer.start(info_of(step), self.held(state or state_of(step), place), nothing, self.keep_last, 0)

    def held(self, state: Any, place: ShardPlace) -> Any:
        """What the rank at a place holds."""
        if place.shards == 1:
            return state
        with pretended_rank(place) as mesh:
            model = {
                name: nn.Parameter(sharded(each, place, mesh), requires_grad=each.requires_grad)
                for name, each in state["model"].items()
            }
        return {**state, "model": model}

    def save(self, *steps: int) -> None:
        for step in steps:
            self.start(step)
            for writer in self.writers:
                end(writer)
                assert writer.error is None, writer.error

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


@contextmanager
def an_attempt(store: CheckpointStore, shards: int = 1, replicas: int = 1, keep_last: int = 9) -> Iterator[Attempt]:
    attempt = Attempt(store, shards, replicas, keep_last)
    try:
        yield attempt
    finally:
        attempt.close()


def inodes(store: CheckpointStore, step: int) -> dict[int, int]:
    """The files of a checkpoint that hold tensors, with their sizes."""
    found = [path.stat() for path in store.path(step).glob("shard_*")]
    return {each.st_ino: each.st_size for each in found}


def shared(store: CheckpointStore, one: int, other: int) -> int:
    """How many bytes two checkpoints have in common on the disk."""
    there = inodes(store, other)
    return sum(size for inode, size in inodes(store, one).items() if inode in there)


def whole(store: CheckpointStore, *steps: int) -> None:
    """These checkpoints are there, each with the state handed over."""
    assert store.steps() == list(steps)
    for step in steps:
        assert same(load(store.path(step), store.verify(step)), state_of(step))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 1), (2, 2)], ids=str)
def test_no_byte_twice(sizes: tuple[int, int], store: CheckpointStore) -> None:
    """From the third save on, what is frozen is not written any more; and no two checkpoints in a row share a file,
    so that one bad spot on a disk cannot take both."""
    with an_attempt(store, *sizes) as attempt:
        attempt.save(1, 2, 3, 4, 5)
    whole(store, 1, 2, 3, 4, 5)
    assert store.manifest(5).format == FIXED_FORMAT
    for step in (3, 4, 5):
        assert shared(store, step, step - 2) == FROZEN
        assert shared(store, step, step - 1) == 0
    deleted = inodes(store, 3)
    shutil.rmtree(store.path(3))
    whole(store, 1, 2, 4, 5)
    assert deleted.keys() & inodes(store, 5).keys()


def test_a_resumed_run_links_to_what_it_has_read(store: CheckpointStore) -> None:
    """A run that is preempted every hour saves few times per attempt: only the first of these is written whole."""
    with an_attempt(store, 1, 2) as attempt:
        attempt.save(1)
    with an_attempt(store, 1, 2) as attempt:
        for writer in attempt.writers:
            writer.links.note(1, store.verify(1).files)
        attempt.save(2, 3)
    whole(store, 1, 2, 3)
    assert shared(store, 3, 1) == FROZEN and not shared(store, 2, 1) and not shared(store, 3, 2)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("done", [False, True], ids=["refused", "done, but fails"])
def test_a_refused_link(number: int, done: bool, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems without links, a file that has as many as it can, a disk that fails: the bytes are written."""
    real = os.link

    def link(*words: Any) -> None:
        if done:
            real(*words)
        raise OSError(number, os.strerror(number))

    with an_attempt(store) as attempt:
        attempt.save(1, 2)
        monkeypatch.setattr(os, "link", link)
        attempt.save(3, 4)
    whole(store, 1, 2, 3, 4)
    assert not shared(store, 3, 1) and not shared(store, 4, 2)


def test_changed_all_the_same(store: CheckpointStore) -> None:
    """A moving average is not trained, and changes: a link would resume the run with an old one."""
    with an_attempt(store) as attempt:
        for step in range(1, 5):
            attempt.start(step, state_of(step, frozen=step))
            end(attempt.writers[0])
    for step in range(1, 5):
        assert same(load(store.path(step), store.verify(step)), state_of(step, frozen=step))


def test_a_change_after_links(store: CheckpointStore) -> None:
    """Weights that were the same in many checkpoints, and are not now: loaded again, or unfrozen for a while."""
    with an_attempt(store) as attempt:
        attempt.save(1, 2, 3, 4)
        attempt.start(5, state_of(5, frozen=1))
        end(attempt.writers[0])
        unfrozen = state_of(6)
        for parameter in unfrozen["model"].values():
            parameter.requires_grad_(True)
        attempt.start(6, unfrozen)
        end(attempt.writers[0])
        attempt.save(7, 8, 9)
    assert same(load(store.path(5), store.verify(5)), state_of(5, frozen=1))
    assert same(load(store.path(6), store.verify(6)), unfrozen)
    assert shared(store, 9, 7) and not shared(store, 9, 8)
    shutil.rmtree(store.path(5))
    shutil.rmtree(store.path(6))
    whole(store, 1, 2, 3, 4, 7, 8, 9)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_pruned_meanwhile(keep_last: int, store: CheckpointStore) -> None:
    """The checkpoint to link from is deleted by the run itself, as soon as there are newer ones."""
    with an_attempt(store, 1, 2, keep_last=keep_last) as attempt:
        attempt.save(*range(1, 7))
    whole(store, *range(7 - keep_last, 7))
    assert {found.st_nlink for path in store.path(6).glob("shard*") for found in [path.stat()]} == {1}


def replace(store: CheckpointStore) -> None:
    """Another process replaces the checkpoint of step 1, with other bytes in as many files."""
    store.path(1).rename(store.folder / "aside")
    shutil.copytree(store.folder / "aside", store.path(1))
    for path in store.path(1).glob("shard*"):
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("action", [lambda store: shutil.rmtree(store.path(1)), replace], ids=["deleted", "replaced"])
def test_gone_at_any_moment(action: Callable[[CheckpointStore], None], tmp_path: Path, store: CheckpointStore) -> None:
    """Somebody deletes or truncates the older checkpoint right before any call to the disk: the new one is whole. The
    commit sees a file that is truncated right after the link: that save fails, and the next one is whole."""
    for call in range(100):
        store = CheckpointStore(tmp_path / str(call))
        with an_attempt(store) as attempt:
            attempt.save(1, 2)
            with acting_at(call, lambda store=store: action(store)) as calls:  # type: ignore[misc]
                attempt.start(3)
                end(attempt.writers[0])
            if (error := attempt.writers[0].error) is not None:
                assert action is replace and "was truncated after it was written" in str(error)
                attempt.save(3)
        assert same(load(store.path(3), store.verify(3)), state_of(3))
        if len(calls) <= call:
            assert call > 5, "the disk calls were seen"
            return
    raise AssertionError("a save takes a hundred disk calls")


@pytest.mark.parametrize("error", [SystemExit(), OSError(28, "No space left on device")], ids=["killed", "disk"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fails_anywhere(error: BaseException, tmp_path: Path, store: CheckpointStore) -> None:
    """All processes killed, or the disk full, at each disk call of a save that links, such as between the link and the
    commit: the older checkpoints are whole, the new one is there, whole, or not at all, and nothing else is left."""
    for call in range(1000):
        store = CheckpointStore(tmp_path / str(call))
        with an_attempt(store, 1, 2) as attempt:
            attempt.save(1, 2)
            with failing_at(call, error) as calls:
                attempt.start(3)
                if isinstance(error, OSError):
                    for writer in attempt.writers:
                        end(writer)
                else:
                    until(
                        lambda: any(writer.wait(0) for writer in attempt.writers), "both ranks wait for a dead thread"
                    )
                    attempt.close()
        store.recover()
        whole(store, 1, 2, *([3] if 3 in store.steps() else []))
        assert not [path for path in store.folder.iterdir() if not path.name[5:].isdigit()], "nothing is left over"
        shutil.rmtree(store.folder)
        if len(calls) <= call:
            assert call > 12 and "link" in calls, "the disk calls were seen"
            return
    raise AssertionError("a save takes a thousand disk calls")


def test_an_exception_in_a_link_is_a_failed_save(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any kind: a rank that did not report would leave the others waiting."""

    def link(*words: Any) -> None:
        raise RuntimeError("a bug")

    with an_attempt(store, 1, 2) as attempt:
        attempt.save(1, 2)
        monkeypatch.setattr(os, "link", link)
        attempt.start(3)
        for writer in attempt.writers:
            end(writer)
            assert "a bug" in str(writer.error)
        monkeypatch.undo()
        attempt.save(3)
    whole(store, 1, 2, 3)


def test_the_same_step_again(store: CheckpointStore) -> None:
    """A save that replaces the newest checkpoint must not share a file with the one before that, which is then the
    only other."""
    with an_attempt(store) as attempt:
        attempt.save(1, 2, 3, 3)
    whole(store, 1, 2, 3)
    assert not shared(store, 3, 2)


def test_one_damaged_file(store: CheckpointStore) -> None:
    """A flipped bit in a file that many checkpoints share is found by its hash, and the one before has its own."""
    with an_attempt(store) as attempt:
        attempt.save(1, 2, 3, 4, 5)
    name = max(store.manifest(5).shards)
    assert store.path(5).joinpath(name).stat().st_nlink == 3
    flip(store, 5, name)
    said: list[str] = []
    newest = store.newest(said.append)
    assert newest is not None and newest.step == 4 and len(said) == 1 and name in said[0]
    assert [store.is_intact(step) for step in range(1, 6)] == [False, True, False, True, False]


def test_room_made_is_counted_once(store: CheckpointStore) -> None:
    """On a full disk a save is tried again at once if older checkpoints gave room; linked files do not."""
    with an_attempt(store) as attempt:
        attempt.save(1, 2, 3, 4)
    before = {path.stat().st_ino: path.stat().st_size for path in store.folder.rglob("*") if path.is_file()}
    freed = store.make_room(keep_best=0)
    after = {path.stat().st_ino: path.stat().st_size for path in store.folder.rglob("*") if path.is_file()}
    manifests = 3 * store.path(4).joinpath("manifest.json").stat().st_size
    assert freed == sum(before.values()) - sum(after.values()) and freed > FROZEN + manifests
    whole(store, 4)


def test_a_rescue_reads_and_writes_them(store: CheckpointStore) -> None:
    """A survivor alone writes everything into one file; the next attempt saves from it as from any other."""
    save_alone(store, info_of(1), state_of(1))
    assert store.manifest(1).shards == ["shard_0000-of-0001.bin"]
    with an_attempt(store) as attempt:
        attempt.writers[0].links.note(1, store.verify(1).files)
        attempt.save(2, 3, 4)
    whole(store, 1, 2, 3, 4)
    assert shared(store, 4, 2)


def test_a_structure_of_another_format(store: CheckpointStore) -> None:
    """The order of the bytes follows from both files: a mixture would load weights into the wrong tensors."""
    with an_attempt(store) as attempt:
        attempt.save(1)
    torch.save(state_of(2), store.path(1) / STRUCTURE)
    with pytest.raises(files.CheckpointError, match="its structure is not of format 4"):
        load(store.path(1), store.manifest(1))


def test_adapters_alone(tmp_path: Path) -> None:
    """`export --trained` writes what the run trains: megabytes where the model has gigabytes."""
    run = RunDir(tmp_path)
    save_alone(CheckpointStore(run.checkpoints), CheckpointInfo(1, 1, 8, {}), state_of(1))
    everything, trained = read_run(run), read_run(run, trained=True)
    assert trained.tensors.keys() == {"0.adapter", "1.adapter"} and trained.left_out == 2
    assert everything.tensors.keys() == state_of(1)["model"].keys() and everything.left_out == 0
    assert torch.equal(trained.tensors["1.adapter"], state_of(1)["model"]["1.adapter"])


def test_a_run_of_adapters(root: Path) -> None:
    """A training function need not do anything for it: what it freezes is linked, also by the attempt that resumes."""
    words = ("task=tests.loops.foreign_loops.adapters", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    run = train(config(root, "adapters", 2, (*words, "train.max_steps=null")))
    found = CheckpointStore(run.checkpoints)
    assert found.steps() == [1, 2, 3, 4] and found.manifest(4).format == FIXED_FORMAT
    assert shared(found, 4, 2) == shared(found, 3, 1) == 192 and not shared(found, 4, 3)
    assert all(found.is_intact(step) for step in found.steps())

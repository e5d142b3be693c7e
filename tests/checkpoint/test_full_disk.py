"""A full disk, or a quota that is used up: older checkpoints give their room to the next one. On a real file system."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from laststep.checkpoint.manager import CheckpointManager, Position
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo
from laststep.config.keep import Ranking
from laststep.config.schema import Checkpoint
from laststep.ranks.group import Group
from laststep.records.metrics import read_lines
from tests.support.commands import begin, end
from tests.support.needs import require_root
from tests.support.project import PROJECT, wait_until
from tests.support.records import a_world

STATE = {"weights": torch.arange(1_000_000, dtype=torch.float32)}  # 4 MB


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of `request.param` MB."""
    require_root("to mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


class Saves:
    """The saves of a run of one rank, one after another."""

    def __init__(self, folder: Path, stopping: bool = False, **settings: Any) -> None:
        group = Group(a_world(), dist.HashStore(), torch.device("cpu"))
        self.store, self.said = CheckpointStore(folder / "checkpoints"), Mock()
        checkpoint = Checkpoint(**{"every_minutes": 600.0, "keep_last": 2, "keep_best": 0, **settings})
        self.manager = CheckpointManager(
            checkpoint, Mock(), self.store, group, Mock(), self.said, Mock(), lambda: stopping
        )

    def save(self, step: int, **metrics: float) -> bool:
        """Save this step; returns whether that has succeeded."""
        self.manager.start_save(Position(step=step), CheckpointInfo(step, 1, step, metrics), STATE)
        self.manager.wait()
        return self.manager.saved.step == step

    @property
    def last_line(self) -> str:
        """What was printed last."""
        return str(self.said.say.call_args[0][0])


@pytest.mark.parametrize("small_disk", [10], indirect=True)
def test_older_checkpoints_make_room(small_disk: Path) -> None:
    """There is room for two checkpoints and not for three: the third save finds the disk full, and takes the place of
    the oldest at once, instead of failing three times and ending the run."""
    saves = Saves(small_disk)
    assert saves.save(1) and saves.save(2)
    assert not saves.save(3)
    assert "No space left on device" in saves.last_line
    assert "4 MB, were deleted to make room" in saves.last_line
    assert saves.manager.due_in_s() <= 0, "the retry waits for nothing"
    assert saves.store.steps() == [2], "the newest is kept until there is a newer one"
    assert saves.save(3)
    assert saves.store.steps() == [2, 3]
    saves.manager.close()


@pytest.mark.parametrize("small_disk", [10], indirect=True)
def test_the_best_is_kept(small_disk: Path) -> None:
    """What the user has asked to keep for its metrics is no room to be had: the run says that the disk is full."""
    saves = Saves(small_disk, keep_best=1)
    assert saves.save(1, val_loss=0.1) and saves.save(2, val_loss=0.2)
    assert not saves.save(3, val_loss=0.3)
    assert saves.store.steps() == [1, 2]
    assert saves.last_line.endswith("; training continues, the save will be retried")
    saves.manager.close()


def test_none_is_deleted_unless_the_newest_is_intact(tmp_path: Path) -> None:
    """If the newest checkpoint is damaged, an older one is all that the run has."""
    saves = Saves(tmp_path)
    assert saves.save(1) and saves.save(2)
    shard = next(saves.store.path(2).glob("shard_*"))
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    assert saves.store.make_room(0, Ranking("val_loss", lower_is_better=True)) == 0
    assert saves.store.steps() == [1, 2]
    saves.manager.close()


def test_a_quota_that_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EDQUOT is the commonest full disk of all: on most clusters the disk has room, and the user has none."""
    saves = Saves(tmp_path)
    assert saves.save(1) and saves.save(2)
    fsync, refusals = os.fsync, [OSError(errno.EDQUOT, "Disk quota exceeded")]
    monkeypatch.setattr(
        os, "fsync", lambda file: fsync(file) if not refusals else (_ for _ in ()).throw(refusals.pop())
    )
    assert not saves.save(3)
    assert "Disk quota exceeded" in saves.last_line and "were deleted to make room" in saves.last_line
    assert saves.save(3)
    saves.manager.close()


def test_at_a_stop_nothing_is_said_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a stop the training does not continue, and a line that says so misleads."""
    saves = Saves(tmp_path, stopping=True)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert not saves.save(1)
    assert saves.last_line.endswith("No space left on device; it is tried again until the grace period ends")
    saves.manager.close()


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", [24], indirect=True)
def test_a_stop_on_a_disk_that_stays_full(small_disk: Path) -> None:
    """Somebody else fills the disk, and it stays full until the stop: the last save finds the room of an older
    checkpoint, and no step is lost."""
    words = ["--local", "--name", "full", f"launch.root={small_disk / 'runs'}", "launch.tasks_per_node=2"]
    words += ["device=cpu", "train.epochs=1000", "checkpoint.every_steps=20", "checkpoint.keep_best=0"]
    run = small_disk / "runs" / "full"
    process = begin(PROJECT, [sys.executable, "launch.py", *words])
    store = CheckpointStore(run / "checkpoints")
    wait_until(lambda: len(store.steps()) > 1, "there were never two checkpoints")
    with (small_disk / "others").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    process.send_signal(signal.SIGINT)
    said, _ = end(process, 130)
    (record,) = read_lines(run / "attempts.jsonl")
    assert record["lost_steps"] == 0, said
    assert store.steps()[-1] == record["end_step"]
    assert "every step is saved" in said, json.dumps(said)

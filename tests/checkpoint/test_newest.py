"""Which checkpoint a run continues from: never one below what its records say is saved, whatever the disk shows.

A run that began lower did its steps again without a word, and cut what it had recorded.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from laststep.checkpoint import store as store_module
from laststep.checkpoint.store import CheckpointStore, newest_step, recover
from laststep.config.errors import DiskError
from laststep.config.schema import Launch
from laststep.records.attempts import begin_attempt, end_attempt
from laststep.rundir import RunDir
from tests.checkpoint.test_store import truncate, write
from tests.support.disk import refusing
from tests.support.records import a_world

WORLD = a_world(size=2, launcher="submitit-slurm", hosts=("n1", "n2"), local_size=1, nodes=2)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose records say that it has saved step 7 and lost step 8. It has a checkpoint of step 3, too."""
    run = RunDir(tmp_path)
    begin_attempt(run, WORLD, start_step=0)
    end_attempt(run, WORLD, Launch(), "failed", 8, 7)
    write(CheckpointStore(run.checkpoints), 3)
    return run


def start(run: RunDir, warn: Callable[[str], None] = print) -> list[int]:
    return [manifest.step for manifest in recover(CheckpointStore(run.checkpoints), run, warn)]


def test_an_old_view(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may show the folder as it was. It is looked at again, and then the start is refused."""
    monkeypatch.setattr(store_module, "COUNT_S", 0.0)
    monkeypatch.setattr(store_module, "START_S", 0.0)
    with pytest.raises(
        DiskError, match="checkpoints: only goes up to step 3, but the run's records say that step 7 is"
    ):
        start(run)
    assert newest_step(run, print) == 7, "who counts the lost steps must not add these"
    monkeypatch.undo()
    said: list[str] = []

    def shows_up(text: str) -> None:
        said.append(text)
        write(CheckpointStore(run.checkpoints), 7)

    assert start(run, shows_up) == [7, 3]
    assert len(said) == 1 and said[0].endswith("; looking again for 30 s")


def test_an_unmounted_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is the empty folder on which it is mounted elsewhere."""
    monkeypatch.setattr(store_module, "START_S", 0.0)
    monkeypatch.setattr(store_module, "COUNT_S", 0.0)
    run.checkpoints.rename(run.path / "elsewhere")
    run.checkpoints.mkdir()
    with pytest.raises(DiskError, match="has no checkpoint, but the run's records say that step 7 is saved"):
        start(run)
    assert newest_step(run, print) == 7


def test_a_damaged_checkpoint_is_no_excuse_to_stop(run: RunDir) -> None:
    """It is there, so nothing is hidden: the run continues from the one before, and says so."""
    truncate(write(CheckpointStore(run.checkpoints), 7))
    said: list[str] = []
    assert start(run, said.append) == [3] and len(said) == 1 and said[0].startswith("skipped step_000000007: ")
    assert newest_step(run, print) == 3


def test_a_later_one_than_recorded(run: RunDir) -> None:
    """An attempt was killed after a save, which nobody has recorded, and which deleted the one that is recorded."""
    write(CheckpointStore(run.checkpoints), 9)
    assert start(run) == [9, 3] and newest_step(run, print) == 9


def test_a_lost_attempt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has recorded no end. It has kept at least the step that it began with."""
    monkeypatch.setattr(store_module, "START_S", 0.0)
    begin_attempt(run, replace(WORLD, restart=1), start_step=9)
    with pytest.raises(DiskError, match="step 9 is saved"):
        start(run)
    write(CheckpointStore(run.checkpoints), 9)
    assert start(run) == [9, 3]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_each_look_fails_once(run: RunDir, number: int) -> None:
    """Whichever file a start looks at, and whichever call fails there once: it begins with the newest checkpoint."""
    store = CheckpointStore(run.checkpoints)
    write(store, 7).rename(hidden := run.checkpoints / "step_000000007.replaced")
    looked_at = (
        run.checkpoints,
        hidden,
        run.attempts,
        *(store.path(7) / name for name in ("manifest.json", "structure.pt")),
    )
    final = run.checkpoints / "step_000000007"
    for path in (*looked_at, final, *(final / path.name for path in looked_at[3:])):
        with refusing(path, number, times=1):
            assert start(run) == [7, 3], path
        (run.checkpoints / "step_000000007").rename(hidden)

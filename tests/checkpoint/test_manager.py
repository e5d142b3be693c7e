"""When the next save is due, and who takes note of how it ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from laststep.checkpoint.manager import CheckpointManager, Position
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo
from laststep.config.schema import Checkpoint
from laststep.ranks.group import Group
from tests.support.project import DEADLINE_S
from tests.support.records import a_world

EVERY_S = 600.0


@contextmanager
def manager(folder: Path, **metrics: Any) -> Iterator[CheckpointManager]:
    """The saves of a run of one rank."""
    group = Group(a_world(), dist.HashStore(), torch.device("cpu"))
    saves = CheckpointManager(
        *(Checkpoint(every_minutes=EVERY_S / 60), Mock(), CheckpointStore(folder / "checkpoints"), group),
        *(Mock(**metrics), Mock(), Mock(), lambda: False),
    )
    try:
        yield saves
    finally:
        saves.close()


def start_save(saves: CheckpointManager) -> None:
    """Start to save step 1."""
    saves.start_save(Position(step=1), CheckpointInfo(1, 1, 1, {}), {"position": {"step": 1}})


def test_a_slow_save_does_not_make_training_wait_for_it(tmp_path: Path) -> None:
    """The loop would stand still from the moment the next save is due until this one is written. But a disk that hangs
    must not go unnoticed: after another interval the next save is due all the same."""
    written = threading.Event()
    with manager(tmp_path, sync=lambda: written.wait(60)) as saves:
        assert EVERY_S - 60 < saves.due_in_s() <= EVERY_S
        start_save(saves)
        assert 2 * EVERY_S - 60 < saves.due_in_s() <= 2 * EVERY_S
        written.set()
        saves.wait()
        assert saves.saved.step == 1
        assert EVERY_S - 60 < saves.due_in_s() <= EVERY_S


def test_two_threads_take_note_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that trains and the rescue's, at the same moment. One of them used to note that nothing was saved, and
    failed: a rescue that fails saves nothing."""
    with manager(tmp_path) as saves, ThreadPoolExecutor(2) as threads:
        start_save(saves)
        assert saves.writer.wait(DEADLINE_S), "the save did not end"
        both = threading.Barrier(2)

        def wait(timeout_s: float) -> bool:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)  # until the other thread is as far, unless it waits for this one
            return True

        monkeypatch.setattr(saves.writer, "wait", wait)
        for result in [threads.submit(saves.poll) for _ in range(2)]:
            result.result(DEADLINE_S)
        assert saves.saved.step == 1
        assert cast(Mock, saves._metrics.mark_checkpointed).call_count == 1


def test_a_save_that_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the thread that trains copies the state, and after that has failed, the writer says that the save before
    has ended well. A rescue in that moment believed that the step was saved, and lost it."""
    copying, copied = threading.Event(), threading.Event()

    def start(*_: Any) -> None:
        copying.set()
        assert copied.wait(DEADLINE_S), "the test did not let the copy end"
        raise MemoryError("no memory left for the copy")

    with manager(tmp_path) as saves, ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(saves.writer, "start", start)
        saving = threads.submit(start_save, saves)
        assert copying.wait(DEADLINE_S), "the save did not begin"
        saves.wait(timeout_s=0.0)
        assert saves.saved.step == 0, "of a state that is being copied"
        copied.set()
        with pytest.raises(MemoryError):
            saving.result(DEADLINE_S)
        saves.wait()
        assert saves.saved.step == 0, "of a state that could not be copied"

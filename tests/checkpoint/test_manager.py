"""When the next save is due."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import Mock

import torch
import torch.distributed as dist

from tests.support.worlds import a_world
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.position import Position
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.writer import CheckpointInfo
from trainer.config.schema import Checkpoint
from trainer.world.group import Group

EVERY_S = 600.0


def test_a_slow_save_does_not_make_training_wait_for_it(tmp_path: Path) -> None:
    """The loop would stand still from the moment the next save is due until this one is written. But a disk that hangs
    must not go unnoticed: after another interval the next save is due all the same."""
    written = threading.Event()
    metrics = Mock(sync=lambda: written.wait(60))
    group = Group(a_world(), dist.HashStore(), torch.device("cpu"))
    saves = CheckpointManager(
        *(Checkpoint(every_minutes=EVERY_S / 60), Mock(), CheckpointStore(tmp_path / "checkpoints"), group, metrics),
        *(Mock(), Mock(), lambda: False),
    )
    try:
        assert EVERY_S - 60 < saves.due_in_s() <= EVERY_S
        saves.start_save(Position(step=1), CheckpointInfo(1, 1, 1, {}), {"position": {"step": 1}})
        assert 2 * EVERY_S - 60 < saves.due_in_s() <= 2 * EVERY_S
        written.set()
        saves.wait()
        assert saves.saved.step == 1
        assert EVERY_S - 60 < saves.due_in_s() <= EVERY_S
    finally:
        written.set()
        saves.close()

"""Patience with checkpoints: a file of one that cannot be read right now proves no damage."""

from __future__ import annotations

from trainer.checkpoint.files import CheckpointUnreadable
from trainer.world import patience


class Patience(patience.Patience):
    """Insists where the disk refuses to answer, and where it claims to have lost a checkpoint's file."""

    errors = (OSError, CheckpointUnreadable)


NO_PATIENCE = Patience(0.0, lambda text: None)

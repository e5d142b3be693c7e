"""Patience with a disk that does not show a checkpoint, see laststep.ranks.disk."""

from __future__ import annotations

from typing import ClassVar

from laststep.checkpoint.files import CheckpointUnreadable
from laststep.ranks import disk


class Patience(disk.Patience):
    """Waits for a file of a checkpoint that cannot be read, too."""

    passing: ClassVar[tuple[type[Exception], ...]] = (OSError, CheckpointUnreadable)


NO_PATIENCE = Patience(0.0, lambda text: None)

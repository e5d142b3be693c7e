"""AttemptState: what this rank knows of its attempt so far.

The main thread fills it in while the attempt starts. The watchdog and the end by fault read it from threads of their
own, at any moment, so each field stays at its first value until it has its final one.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.ranks.beside import BesideTraining
from laststep.ranks.process import Signals
from laststep.ranks.world import World
from laststep.rundir import RunDir

if TYPE_CHECKING:
    from laststep.loops.engine import Engine
    from laststep.ranks.group import Group
    from laststep.ranks.stop import Stop


class AttemptState:
    """The parts of one attempt on one rank; those that need torch are None until they exist."""

    def __init__(self, config: Config, run_dir: RunDir, world: World, signals: Signals) -> None:
        self.config = config
        self.run_dir = run_dir
        self.signals = signals
        self.store = CheckpointStore(run_dir.checkpoints)
        self.start_step = 0  # of the checkpoint that this attempt resumes from
        self.group: Group | None = None
        self.stop: Stop | None = None
        self.engine: Engine | None = None
        self._launched = world
        self.beside = BesideTraining(config, run_dir, world)

    @property
    def world(self) -> World:
        """This rank's place: the group's, which knows every host, once there is a group; else the launcher's."""
        return self._launched if self.group is None else self.group.world

    def set_number(self, number: int | None) -> None:
        """Set the attempt's number within its run: on rank 0 before the ranks meet, on the others as they do."""
        world = replace(self.world, number=number)
        if self.group is None:
            self._launched = world
        else:
            self.group.world = world

    @property
    def ticks(self) -> int:
        """Units of work begun so far, see `Stop`."""
        return self.stop.tick if self.stop else 0

    @property
    def cause_signal(self) -> signal.Signals | None:
        """The signal that says why this attempt stops. A SIGINT is the user's word, also after another signal."""
        interrupted = any(number == signal.SIGINT for number, _ in self.signals.received)
        return signal.SIGINT if interrupted else self.signal

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that stops this attempt, if any; the same on every rank once they have agreed on a last step."""
        return (self.stop.signal if self.stop else None) or self.signals.first

    @property
    def signalled_at(self) -> float | None:
        """time.monotonic() of the first signal known to this rank, its own or another rank's."""
        noticed_at = self.stop.noticed_at if self.stop else None
        return min((moment for moment in (noticed_at, self.signals.first_at) if moment is not None), default=None)

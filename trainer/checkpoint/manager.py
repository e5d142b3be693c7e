"""When a run saves, and what becomes of its saves. All ranks call these methods together."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

from trainer.checkpoint.interval import AutoInterval
from trainer.checkpoint.position import Position
from trainer.checkpoint.store import CheckpointError, CheckpointStore
from trainer.checkpoint.writer import CheckpointInfo, CheckpointWriter
from trainer.config.schema import Checkpoint
from trainer.observe.progress import Progress
from trainer.records.metrics import MetricsFile, read_lines
from trainer.rundir import RunDir
from trainer.world.group import Group, PeerLost
from trainer.world.watchdog import Watchdog

MAX_FAILED = 3
RETRY_S = 60.0
RETRY_LAST_S = 2.0  # at a stop or at the end, where nothing else is to do
# A rank that is waited for in a save and gives no sign of life for so long is dead.
GONE_S = 5.0


class CheckpointManager:
    """The saves of one attempt. Training goes on beside them, and when the disk refuses one: it costs a warning, and
    is tried again a minute later."""

    def __init__(
        self,
        settings: Checkpoint,
        run: RunDir,
        store: CheckpointStore,
        group: Group,
        metrics: MetricsFile,
        progress: Progress,
        watch: Watchdog,
        stopping: Callable[[], bool],
    ) -> None:
        self.saved = Position()  # what the newest checkpoint has
        self.saving: Position | None = None  # what it will have once the save under way is committed
        self.due = False
        self.last = False  # the attempt does nothing but save any more
        self._settings = settings
        self._saver = CheckpointWriter(store, group.store, group.world.rank, group.world.size, group.device)
        self._metrics = metrics
        self._progress = progress
        self._watch = watch
        self._stopping = stopping
        self._every_s, self._auto = math.inf, None
        if isinstance(settings.every_minutes, str):
            ends = read_lines(run.attempts) if group.world.rank == 0 else []  # who decides has seen them all settled
            self._auto = AutoInterval(ends, len(set(group.world.hosts)), progress.say)
        elif settings.every_minutes is not None:
            self._every_s = 60 * settings.every_minutes
        self._began = time.monotonic()
        self._failed = 0  # in a row

    def begin(self, position: Position, about: CheckpointInfo, state: dict[str, Any]) -> None:
        """Save `state` beside the training, unless there is a checkpoint of this place.

        Waits for the save before it. Raises CheckpointError when `MAX_FAILED` in a row have failed, PeerLost when a
        rank has died in the one before.
        """
        self.due = False
        began = time.perf_counter()
        self.wait()
        if not self.saved.same_place(position):
            self.saving = copy.copy(position)
            self._began = time.monotonic()
            self._saver.start(about, state, self._metrics.sync, (self._settings.keep_last, self._settings.keep_best))
            if not self._settings.asynchronous:
                self.wait()
            if self._auto:
                self._auto.stood_still(time.perf_counter() - began)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the save under way, if there is one, so long at most. Raises like `begin`."""
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while self.saving is not None and not self._saver.wait(0.5) and time.monotonic() < until:
            gone = [rank for rank in self._saver.missing if self._watch.silent(rank, GONE_S)]
            if gone:
                raise PeerLost(f"rank {', '.join(map(str, gone))} gave no sign of life for {GONE_S:.0f} s in a save")
        self.note()

    def note(self) -> None:
        """See what became of the save under way, if that is known. Raises CheckpointError after too many failures."""
        if self._auto:
            self._auto.stepped(*self._progress.stretch(), saving=self.saving is not None)
        if self.saving is None or not self._saver.wait(0):
            return
        saving, self.saving = self.saving, None
        if self._saver.error is None:
            self._failed = 0
            self.saved = saving
            self._metrics.settle(saving.records)
            self._progress.say(f"saved step {saving.step}")
            return
        self._failed += 1
        self._progress.say(f"WARNING: {self._saver.error}; training goes on, the save is tried again")
        if self._failed >= MAX_FAILED and not self._stopping():  # at a stop it is tried as long as the grace lasts
            raise CheckpointError(f"{self._failed} saves in a row failed, the last so: {self._saver.error}")

    def due_in_s(self) -> float:
        """Seconds until it is time for a save, or to try a failed one again; each rank's clock has its own answer."""
        every_s = self._auto.seconds if self._auto else self._every_s
        return (RETRY_S if self._failed else every_s) - (time.monotonic() - self._began)

    def close(self) -> None:
        """No more saves."""
        self._saver.close()

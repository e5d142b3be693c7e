"""CheckpointManager: decides when a run saves, and follows each save to its end.

Training continues while a save is written. If the disk refuses a save, training continues too: the failure costs a
warning, and the save is retried after a minute; at once if older checkpoints were deleted to make room. All ranks call
these methods together. A framework that writes files of its own (`laststep.checkpoint.opaque`) does so while training
waits; the rest of the save is as ever.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.interval import AutoInterval
from laststep.checkpoint.opaque import OpaqueFiles
from laststep.checkpoint.store import CheckpointStore, ranked
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.config.errors import DiskError
from laststep.config.keep import Anchors, Ranking
from laststep.config.schema import Checkpoint
from laststep.ranks.group import Group, PeerLost
from laststep.ranks.process import run_time
from laststep.ranks.watchdog import Watchdog
from laststep.records.attempt_record import read_ended_attempts
from laststep.records.metrics import MetricsFile
from laststep.records.progress import Progress
from laststep.rundir import RunDir

MAX_FAILED = 3  # saves in a row, before the attempt fails
RETRY_S = 60.0
RETRY_LAST_S = 2.0  # at a stop or at the end of the run, when there is nothing else to do
INSIST_LAST_S = 60.0  # at least, at the end of the run


class CheckpointManager:
    """The saves of one attempt: what is saved, what is being saved, and when the next save is due."""

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
        self.saved = Position()  # the position in the newest checkpoint
        self.saving: Position | None = None  # the position that the save in progress will have committed
        self.due = False  # whether to save after the current step
        self.stalled_s = 0.0  # how long the loop has stood still for saves
        self.last = False  # whether saving is all that is left for this attempt to do
        self._settings, self._group = settings, group
        self._ranking, self._anchors = Ranking.parse(settings.best_by), Anchors.parse(settings.anchors)
        self._store = store
        self._opaque: OpaqueFiles | None = None
        self.writer = CheckpointWriter(store, group.store, group.world.rank, group.world.size, group.device)
        self._metrics = metrics
        self._progress = progress
        self._watch = watch
        self._stopping = stopping
        self._every_s, self._auto = math.inf, None
        if isinstance(settings.every_minutes, str):
            # Only rank 0's interval counts, and it has completed the records of earlier attempts.
            ends = read_ended_attempts(run.attempts) if group.world.rank == 0 else []
            self._auto = AutoInterval(ends, len(set(group.world.hosts)), progress.say)
        elif settings.every_minutes is not None:
            self._every_s = 60 * settings.every_minutes
        # The thread that trains and the rescue's both take note of a save's result: one of them must, and only once.
        self._lock = threading.Lock()
        self._started = threading.Event()  # whether the writer has begun with the save in progress
        self._began = time.monotonic()  # the last save, or this attempt
        self._failed = 0  # saves in a row
        self._failing_since = 0.0  # the first of them
        self._has_room = False  # whether older checkpoints were deleted because the last save found the disk full

    def add_opaque(self, write: Callable[[Path], object]) -> None:
        """From now on have a framework write into the folder of each checkpoint, see `OpaqueFiles`."""

        def note_activity() -> None:
            self._watch.activity += 1

        self._opaque = OpaqueFiles(write, self._group, self._check_alive, note_activity)

    def start_save(self, position: Position, info: CheckpointInfo, state: dict[str, Any]) -> None:
        """Start to save `state` in the background, unless there is a checkpoint of this position already.

        Waits for the previous save first. Raises CheckpointError when `MAX_FAILED` saves in a row have failed, PeerLost
        when a rank died during the previous one, and what `OpaqueFiles.save` raises.
        """
        self.due = False
        began = time.perf_counter()
        self.wait()
        if not self.saved.same_moment(position):
            self._began, writing = time.monotonic(), time.perf_counter()
            opaque = self._opaque.save(self.writer.next_folder(info.step)) if self._opaque else None
            self._started.clear()
            self.saving = copy.copy(position)
            keep_last, keep_best = self._settings.keep_last, self._settings.keep_best
            try:
                self.writer.start(
                    info, state, self._metrics.sync, keep_last, keep_best, self._ranking, opaque, self._anchors
                )
            except BaseException:
                self.saving = None
                raise
            finally:
                self._started.set()
            self.stalled_s += time.perf_counter() - writing
            if not self._settings.asynchronous:
                self.wait()
            if self._auto:
                self._auto.add_stall(time.perf_counter() - began)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the save in progress, if any, for at most `timeout_s`. Raises like `start_save`."""
        began = time.perf_counter()
        until = float("inf") if timeout_s is None else run_time() + timeout_s
        while self.saving is not None and not self._has_ended(0.5) and run_time() < until:
            self._check_alive(self.writer.missing_ranks)
        self.stalled_s += time.perf_counter() - began
        self.poll()

    def _check_alive(self, missing: list[int]) -> None:
        """Raise PeerLost if one of the ranks that a save waits for is dead."""
        if dead := [rank for rank in missing if self._watch.is_dead(rank, in_a_hurry=self._stopping())]:
            raise PeerLost(f"rank {', '.join(map(str, dead))} gave no sign of life during a save")

    def poll(self) -> None:
        """Take note of the result of the save in progress, if it has ended. Raises CheckpointError after too many
        failures."""
        with self._lock:
            if self._auto:
                self._auto.add_steps(*self._progress.since_restart(), saving=self.saving is not None)
            if self.saving is None or not self._has_ended(0):
                return
            saving, error = self.saving, self.writer.error
            self._has_room = self.writer.freed > 0
            if error is None:
                self._failed = 0
                self.saved = saving
            else:
                self._failed += 1
            self.saving = None  # after `saved`: a thread that finds no save in progress looks there
        if error is None:
            self._metrics.mark_checkpointed(saving.records)
            self._progress.say(f"saved step {saving.step}")
            return
        self._progress.say(f"WARNING: {error}; {self._what_follows()}")
        if self._failed == 1:
            self._failing_since = time.monotonic()
        # At a stop it is retried for as long as the grace lasts. At the end of the run three retries take no time.
        too_soon = self.last and time.monotonic() < self._failing_since + INSIST_LAST_S
        if self._failed >= MAX_FAILED and not self._stopping() and not too_soon:
            raise CheckpointError(f"{self._failed} saves in a row failed, the last with: {error}")

    def _what_follows(self) -> str:
        """What is done about a failed save."""
        if self._has_room:
            return f"older checkpoints, {self.writer.freed / 1e6:,.0f} MB, were deleted to make room for another try"
        if self.last or self._stopping():
            return "it is tried again until the grace period ends" if self._stopping() else "it is tried again"
        return "training continues, the save will be retried"

    def _has_ended(self, timeout_s: float) -> bool:
        """Whether the save in progress has ended. While the thread that trains still copies the state for it, the
        writer says only how the one before has ended."""
        return self._started.wait(timeout_s) and self.writer.wait(timeout_s)

    def would_be_best(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether a checkpoint with these metrics would be one of the best. Reads the manifests of the others."""
        badness = self._ranking.badness(metrics)
        if math.isnan(badness):
            return False
        kept = {}
        try:
            for step in set(self._store.steps()) - self._store.damaged:
                with contextlib.suppress(CheckpointError):
                    kept[step] = self._store.manifest(step)
        except DiskError:  # of a disk that passes: one save too many costs little
            return True
        better = [step for step in ranked(kept, self._ranking) if self._ranking.badness(kept[step].metrics) <= badness]
        return len(better) < self._settings.keep_best

    def due_in_s(self) -> float:
        """Seconds until the next save, or the retry of a failed one, is due by the clock. Each rank has its own clock,
        so the answers differ."""
        every_s = (
            (0.0 if self._has_room else RETRY_S)
            if self._failed
            else self._auto.seconds
            if self._auto
            else self._every_s
        )
        # Training would stand still until a save in progress is written, so that save gets another interval. It gets no
        # more: if the disk hangs, training must not continue without checkpoints.
        intervals = 1 if self.saving is None or self._has_ended(0) else 2
        return intervals * every_s - (time.monotonic() - self._began)

    def close(self) -> None:
        """End the writer and the metrics, which it syncs; no save can be started any more."""
        self.writer.close()
        self._metrics.close()


@dataclass
class Position:
    """How far a run has come. Steps and samples are counted from the start of the run, over all epochs."""

    step: int = 0
    samples: int = 0  # consumed by finished steps; prefetched ones do not count
    validated: int = 0  # the last step of the newest epoch that has ended, validation included
    loss_sum: float = 0.0  # over the samples of the current epoch so far
    loss_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the line of the newest ended epoch in metrics.jsonl
    records: int = 0  # lines of metrics.jsonl that belong to this position
    skipped: int = 0  # steps without an update because the loss or a gradient was not finite
    epoch: int = 0  # epochs that have ended
    # Of the newest ended epoch. A run that ended within an epoch and is extended continues that epoch.
    cut_loss_sum: float = 0.0
    cut_loss_samples: int = 0
    # Of a custom training loop:
    batches: int = 0  # steps done in the current epoch
    over: bool = False  # all steps of the current epoch are done, the code that follows them in the epoch is not
    measured: int = 0  # the step of the newest validation within an epoch
    one_epoch: bool = False  # the loop that has returned has no run.epochs(...)
    finished: bool = False  # the loop has returned; `metrics` is its result
    modes: str = ""  # of its modules in the last step, see laststep.loops.loop_rules
    streams: dict[str, Any] = field(default_factory=dict)  # by their names, see laststep.data.streams.StreamRecord

    def end_epoch(self, record: dict[str, Any]) -> None:
        """End the current epoch after the last finished step. `record` is its line of metrics.jsonl."""
        self.metrics, self.validated = record, self.step
        self.cut_loss_sum, self.cut_loss_samples = self.loss_sum, self.loss_samples
        self.loss_sum, self.loss_samples = 0.0, 0
        self.epoch, self.batches, self.over = self.epoch + 1, 0, False

    def reopen_epoch(self, begins_after: int) -> None:
        """Undo `end_epoch`. `begins_after` is the last step before the epoch."""
        self.batches = self.step - begins_after
        self.validated, self.epoch, self.records = begins_after, self.epoch - 1, self.records - 1
        self.loss_sum, self.loss_samples = self.cut_loss_sum, self.cut_loss_samples

    @property
    def moment(self) -> tuple[int, int, bool, bool]:
        """What distinguishes it from any other position of the run; a later one is larger."""
        return self.step, self.validated, self.over, self.finished

    def same_moment(self, other: Position) -> bool:
        """Whether a checkpoint of `other` makes one of this position unnecessary."""
        return self.moment == other.moment

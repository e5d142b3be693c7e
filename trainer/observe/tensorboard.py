"""The curves of a run for TensorBoard: a copy of metrics.jsonl, made beside the training.

A thread of rank 0 makes it; no step waits for it. First it compares the event files with metrics.jsonl, and cuts each
where it holds anything else: points of steps that were lost and done again, a torn end, damage. Then it adds what is
missing, in a file of this attempt's own. So the files, one after the other, have each point once, for whoever reads
them; and a TensorBoard that has already read what was cut is told by the next file to forget it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.records.metrics import append
from trainer.rundir import RunDir
from trainer.say import say

if TYPE_CHECKING:
    from trainer.observe.events import Point, Points

EVERY_S = 5.0  # TensorBoard looks no more often either
PAUSE_S = 0.02  # now and then while much is to be copied: the interpreter's lock is the training's
COMPLETE_S = 60.0  # at most, should the disk not answer
BATCH = 200  # points written at once
# TensorBoard reads them in the order of their names. Files that others make in the folder are left alone.
FILE = "events.out.tfevents.{}.laststep"
# Held while tensorboard is imported, and by whoever forks, such as a loader that starts its workers: a module that is
# half imported at a fork stays so in the child, and who wants it there would wait for ever.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


class _NobodyWaits(Exception):
    """The attempt ended before the run did: the rest is the next one's."""


class TensorBoard:
    """Writes the event files of one attempt. On a rank that does not write, nothing happens."""

    def __init__(self, run: RunDir, log_every: int, writes: bool) -> None:
        self._folder = run.tensorboard
        self._metrics = run.metrics
        self._log_every = log_every
        self._writes = writes
        self._path: Path | None = None  # this attempt's file
        self._points: Points | None = None  # None until it is known what the files have
        self._finished = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)

    def start(self) -> None:
        """The first step is done: what is done beside the training holds up no start any more."""
        if self._writes and self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """The attempt adds no more to metrics.jsonl. What can be copied at once is, and nobody waits for it: what is
        missing then, the next attempt adds."""
        self._ended.set()

    def complete(self) -> None:
        """The run is finished, and no attempt comes after this one: wait until the curves are complete."""
        if self._writes:
            self._finished = True
            self._ended.set()
            self.start()
            self._thread.join(COMPLETE_S)

    def _run(self) -> None:
        if self._ended.wait(EVERY_S) and not self._finished:
            return
        try:
            with _importing:
                from trainer.observe import events  # noqa: F401
        except Exception as error:  # not installed, or at odds with protobuf
            say(f"no curves for TensorBoard: {error}")
            return
        warned, last = False, False
        while not last:
            last = self._ended.is_set()
            try:
                self._copy()
            except _NobodyWaits:
                return
            except OSError as error:
                self._points = None
                if not warned:
                    say(f"WARNING: {error}; training goes on, TensorBoard's curves are tried again")
                warned = True
            self._ended.wait(EVERY_S)

    def _copy(self) -> None:
        """Add what metrics.jsonl has by now and the files have not. Raises OSError."""
        if self._points is None or not self._folder.exists():  # someone may have deleted it
            points = self._missing()
        else:
            points = iter(self._points)
        assert self._path is not None
        while batch := list(islice(points, BATCH)):
            begins = not self._path.exists() or self._path.stat().st_size == 0
            append(self._path, (batch[0].header() if begins else b"") + b"".join(point.record() for point in batch))

    def _missing(self) -> Iterator[Point]:
        """Make the files that are there fit, and return the points that they have not."""
        from trainer.observe.events import Points, fit

        self._folder.mkdir(exist_ok=True)
        files = sorted(self._folder.glob(FILE.format("*")))
        if self._path is None:
            number = int(files[-1].name.split(".")[-2]) + 1 if files else 1
            self._path = self._folder / FILE.format(f"{number:06}")
        points = Points(self._metrics, self._log_every, self._pause)
        missing = fit(files, iter(points))
        self._points = points
        return missing

    def _pause(self) -> None:
        """Let the training have the interpreter's lock. Raises _NobodyWaits when the process is about to leave."""
        if self._ended.wait(PAUSE_S) and not self._finished:
            raise _NobodyWaits

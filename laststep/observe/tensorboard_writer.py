"""The curves of a run for TensorBoard: a copy of metrics.jsonl, made in the background of training.

A thread of rank 0 makes the copy, and no step waits for it. It first compares the existing event files with
metrics.jsonl, and cuts each file at the first difference: points of steps that were lost and done again, a torn end,
or damage. Then it writes the missing points to a new file of this attempt. So the files, read one after the other,
contain each point once. A TensorBoard that has already read points which were cut drops them when it reads the header
of the next file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from enum import Enum, auto
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.ranks.disk import NO_PATIENCE, Patience
from laststep.records.append_only import append
from laststep.rundir import RunDir
from laststep.say import say

if TYPE_CHECKING:
    from laststep.observe.event_files import Point, Points

EVERY_S = 5.0  # between two copies; TensorBoard reloads no more often either
PAUSE_S = 0.02  # now and then during a long copy, so that the training gets the interpreter's lock
COMPLETE_S = 60.0  # the longest wait for the last copy, in case the disk does not answer
LAST_S = 20.0  # how long the last copy insists on a disk that refuses
BATCH = 200  # points per write
# TensorBoard reads the files in the order of their names. Files of other writers in the folder are left alone.
FILE = "events.out.tfevents.{}.laststep"
# Held while tensorboard is imported, and by every fork, e.g. of a loader that starts its workers. A module that is half
# imported at a fork stays so in the child, and a worker that imports it too would wait forever.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


class _Stage(Enum):
    """How much the thread may still copy."""

    TRAINING = auto()  # the attempt is in progress: copy every EVERY_S
    STOPPED = auto()  # the attempt is over, the run is not: the process is about to exit, and waits for nothing
    FINISHED = auto()  # the run is finished: copy the rest, and `complete` waits for it


class _Abandoned(Exception):
    """The attempt stopped during a long copy: the next attempt will do the rest."""


class TensorBoard:
    """Writes the event files of one attempt. Does nothing on a rank that does not write."""

    def __init__(self, run: RunDir, log_every: int, writes: bool) -> None:
        self._run_folder = run
        self._folder = run.tensorboard
        self._log_every = log_every
        self._writes = writes
        self._path: Path | None = None  # this attempt's file; None until the folder has been read
        self._points: Points | None = None  # the points not copied yet; None while the files must be compared (again)
        self._stage = _Stage.TRAINING
        self._over = threading.Event()  # set in the stages after TRAINING
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)

    def start(self) -> None:
        """Start copying. Called after the first step, so that the copy does not slow the start down."""
        if self._writes and self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Stop copying: the attempt adds no more to metrics.jsonl. Does not wait. The thread copies what it can before
        the process exits, and the next attempt adds the rest."""
        self._stage = _Stage.STOPPED
        self._over.set()

    def complete(self, wait_s: float = COMPLETE_S) -> None:
        """Copy the rest and wait for it, at most so long: the run is finished, and no attempt follows."""
        if self._writes:
            self._stage = _Stage.FINISHED
            self._over.set()
            self.start()
            self._thread.join(wait_s)

    def _run(self) -> None:
        if self._over.wait(EVERY_S) and self._stage is _Stage.STOPPED:
            return
        try:
            with _importing:
                from laststep.observe import event_files  # noqa: F401
        except Exception as error:  # not installed, or incompatible with the installed protobuf
            say(f"no curves for TensorBoard: {error}")
            return
        warned, last = False, False
        while not last:
            last = self._over.is_set()
            # What the last copy of the run lacks, no attempt will add.
            patience = Patience(LAST_S, say) if self._stage is _Stage.FINISHED else NO_PATIENCE
            try:
                patience.insist(self._copy_all)
            except _Abandoned:
                return
            except OSError as error:
                if not warned:
                    say(f"WARNING: {error}; training continues, and the curves for TensorBoard are tried again")
                warned = True
            self._over.wait(EVERY_S)

    def _copy_all(self) -> None:
        """Append what is missing, and write the run's settings. Raises OSError."""
        from laststep.observe import event_files

        try:
            self._copy()
            event_files.write_hparams(self._run_folder, finished=self._stage is _Stage.FINISHED)
        except OSError:
            self._points = None  # the files must be compared
            raise

    def _copy(self) -> None:
        """Append the points that metrics.jsonl has and the files do not. Raises OSError."""
        if self._points is None or not self._folder.exists():  # a user may have deleted the folder
            points = self._compare()
        else:
            points = iter(self._points)
        assert self._path is not None
        while batch := list(islice(points, BATCH)):
            is_empty = not self._path.exists() or self._path.stat().st_size == 0
            header = batch[0].header() if is_empty else b""
            append(self._path, header + b"".join(point.record() for point in batch))

    def _compare(self) -> Iterator[Point]:
        """Cut the existing files where they differ from metrics.jsonl; returns the points that they lack."""
        from laststep.observe.event_files import Points, fit

        self._folder.mkdir(exist_ok=True)
        files = sorted(self._folder.glob(FILE.format("*")))
        if self._path is None:
            number = int(files[-1].name.split(".")[-2]) + 1 if files else 1
            self._path = self._folder / FILE.format(f"{number:06}")
        points = Points(self._run_folder.metrics, self._log_every, self._pause)
        missing = fit(files, iter(points))
        self._points = points
        return missing

    def _pause(self) -> None:
        """Let the training have the interpreter's lock. Raises _Abandoned once the attempt has stopped."""
        if self._over.wait(PAUSE_S) and self._stage is _Stage.STOPPED:
            raise _Abandoned

"""The curves of a run for TensorBoard: a copy of metrics.jsonl, made in the background of training.

A thread of rank 0 makes the copy, and no step waits for it. It first compares the existing event files with
metrics.jsonl, and cuts each file at the first difference: points of steps that were lost and done again, a torn end,
or damage. Then it writes the missing points to a new file of this attempt. So the files, read one after the other,
contain each point once. A TensorBoard that has already read points which were cut drops them when it reads the header
of the next file.

The files are written with the parts of tensorboard that do not need tensorflow: its EventFileWriter, and so torch's
SummaryWriter, import tensorflow wherever it is installed. They are imported only once there is something to write.
"""

from __future__ import annotations

import io
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, islice
from pathlib import Path
from typing import Any

from laststep.compat import event_file_parts, hparams_parts
from laststep.ranks.disk import NO_PATIENCE, Patience
from laststep.records.append_only import append
from laststep.records.metrics import curves_in, is_step, read_lines
from laststep.rundir import RunDir
from laststep.say import say

EVERY_S = 5.0  # between two copies; TensorBoard reloads no more often either
PAUSE_S = 0.02  # now and then during a long copy, so that the training gets the interpreter's lock
COMPLETE_S = 60.0  # the longest wait for the last copy, in case the disk does not answer
LAST_S = 20.0  # how long the last copy insists on a disk that refuses
BATCH = 200  # points per write
PAUSE_EVERY = 200  # lines of metrics.jsonl
# TensorBoard reads the files in the order of their names. Files of other writers in the folder are left alone.
FILE = "events.out.tfevents.{}.laststep"
HPARAMS = "events.out.tfevents.000000.hparams"  # before all others: TensorBoard never returns to an earlier file
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
                event_file_parts()
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
        try:
            self._copy()
            write_hparams(self._run_folder, finished=self._stage is _Stage.FINISHED)
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


@dataclass(frozen=True)
class Point:
    """The values at one step: those of the step itself, or those of the epoch that it ended."""

    step: int
    time: float  # Unix seconds
    values: dict[str, float]  # by tag
    ends_epoch: bool = False

    def record(self) -> bytes:
        """Its bytes in an event file. The same point always has the same bytes."""
        Event, _, Summary, _ = event_file_parts()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in self.values.items()]
        return framed(Event(wall_time=self.time, step=self.step, summary=Summary(value=values)))

    def header(self) -> bytes:
        """The bytes that precede it when it is the first point of a file. On reading them, TensorBoard drops all points
        from this step on."""
        # The point of an epoch follows the point of its last step, which may be in the previous file and must stay.
        drop_from = self.step + 1 if self.ends_epoch else self.step
        Event, SessionLog, _, _ = event_file_parts()
        start = Event(wall_time=self.time, step=drop_from, session_log=SessionLog(status=SessionLog.START))
        return framed(Event(wall_time=self.time, file_version="brain.Event:2")) + framed(start)


class Points:
    """The points of a metrics.jsonl: every `log_every`-th step, and every epoch.

    Each iteration continues where the previous one ended. `pause` is called after every PAUSE_EVERY lines.
    """

    def __init__(self, path: Path, log_every: int, pause: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._log_every = log_every
        self._pause = pause
        self._offset = 0
        self._time = 0.0  # of the newest step, also used for an epoch, whose line has no time

    def __iter__(self) -> Iterator[Point]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # the line is still being written
                self._offset += len(line)
                if point := self._point(json.loads(line)):
                    yield point
                if number % PAUSE_EVERY == 0:
                    self._pause()

    def _point(self, line: dict[str, Any]) -> Point | None:
        ends_epoch = not is_step(line)
        if not ends_epoch:
            self._time = line["time"]
            if line["step"] % self._log_every:
                return None
        # JSON has no NaN, so the line has null; TensorBoard marks NaN in the curve.
        numbers = {tag: math.nan if value is None else value for tag, value in curves_in(line).items()}
        return Point(line["step"], self._time, numbers, ends_epoch)


def fit(files: Sequence[Path], points: Iterator[Point]) -> Iterator[Point]:
    """Cut each file at the first byte that differs from these points; returns the points that the files lack. Raises
    OSError."""
    point = next(points, None)
    for path in files:
        with path.open("rb+") as file:
            end = 0
            while point is not None:
                expected = point.record() if end else point.header() + point.record()
                if file.read(len(expected)) != expected:
                    break
                end += len(expected)
                point = next(points, None)
            file.truncate(end)
    return points if point is None else chain([point], points)


def framed(event: Any) -> bytes:
    """The bytes of an event in a file."""
    buffer = io.BytesIO()
    *_, RecordWriter = event_file_parts()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def write_hparams(run: RunDir, finished: bool) -> None:
    """Write the file, or add what it lacks; nothing for a run that is not part of a sweep. Raises OSError."""
    varied = _varied(run)
    with run.metrics.open("rb") as file:
        first = file.readline()
    if not varied or not first.endswith(b"\n"):
        return
    at = json.loads(first)["time"]
    wanted = _start(varied, at) + (_end(at) if finished else b"")
    path = run.tensorboard / HPARAMS
    found = path.read_bytes() if path.exists() else b""
    if not wanted.startswith(found):  # damaged, or the run has been extended
        path.unlink()
        found = b""
    if lacking := wanted[len(found) :]:
        append(path, lacking)


def _varied(run: RunDir) -> dict[str, Any]:
    """The keys that the run's sweep varies, with this run's values; empty without a sweep."""
    if (sweep := run.sweep_folder) is None:
        return {}
    lines = (line for line in read_lines(sweep.sweep) if line["run"] == run.name)
    return {key: value for key, value in next(lines, {}).items() if key not in ("run", "typed")}


def _start(varied: Mapping[str, Any], at: float) -> bytes:
    parts = hparams_parts()
    session = parts.SessionStartInfo(start_time_secs=at)
    for key, value in varied.items():
        if isinstance(value, bool):
            session.hparams[key].bool_value = value
        elif isinstance(value, (int, float)):
            session.hparams[key].number_value = value
        else:
            session.hparams[key].string_value = str(value)
    return _record(parts.START_TAG, parts.PluginData(session_start_info=session), at)


def _end(at: float) -> bytes:
    parts = hparams_parts()
    return _record(parts.END_TAG, parts.PluginData(session_end_info=parts.SessionEndInfo(status=parts.SUCCESS)), at)


def _record(tag: str, data: Any, at: float) -> bytes:
    (Event, _, Summary, _), parts = event_file_parts(), hparams_parts()
    value = Summary.Value(tag=tag, metadata=parts.metadata(data), tensor=parts.nothing)
    return framed(Event(wall_time=at, summary=Summary(value=[value])))

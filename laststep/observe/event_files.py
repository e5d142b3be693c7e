"""The content of TensorBoard's event files, made from metrics.jsonl. Importing this module imports tensorboard.

The parts of tensorboard that are used here do not need tensorflow. Its EventFileWriter, and so torch's SummaryWriter,
import tensorflow wherever it is installed.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from laststep.compat import event_file_parts, hparams_parts
from laststep.records.append_only import append
from laststep.records.metrics import VALIDATED, is_step, read_lines
from laststep.rundir import RunDir

Event, SessionLog, Summary, RecordWriter = event_file_parts()

PLACE = ("step", "epoch", "time", "skipped")  # fields of metrics.jsonl that are not curves; all others are
PAUSE_EVERY = 200  # lines of metrics.jsonl


@dataclass(frozen=True)
class Point:
    """The values at one step: those of the step itself, or those of the epoch that it ended."""

    step: int
    time: float  # Unix seconds
    values: dict[str, float]  # by tag
    ends_epoch: bool = False

    def record(self) -> bytes:
        """Its bytes in an event file. The same point always has the same bytes."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in self.values.items()])
        return framed(Event(wall_time=self.time, step=self.step, summary=summary))

    def header(self) -> bytes:
        """The bytes that precede it when it is the first point of a file. On reading them, TensorBoard drops all points
        from this step on."""
        # The point of an epoch follows the point of its last step, which may be in the previous file and must stay.
        drop_from = self.step + 1 if self.ends_epoch else self.step
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
        if ends_epoch:
            values = {_tag(name): value for name, value in line.items() if name not in PLACE}
        else:
            self._time = line["time"]
            if line["step"] % self._log_every:
                return None
            values = {f"train/{name}": value for name, value in line.items() if name not in PLACE}
        # JSON has no NaN, so the line has null; TensorBoard marks NaN in the curve.
        numbers = {tag: math.nan if value is None else value for tag, value in values.items()}
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


def _tag(name: str) -> str:
    """The tag under which TensorBoard shows a value of an epoch."""
    if name == "train_loss":
        return "train/epoch_loss"
    return name.replace("_", "/", 1) if name.startswith(VALIDATED) else f"epoch/{name}"


def framed(event: Any) -> bytes:
    """The bytes of an event in a file."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


# It comes before all other event files of the run: TensorBoard's own reader never returns to an earlier file.
FILE = "events.out.tfevents.000000.hparams"


def write_hparams(run: RunDir, finished: bool) -> None:
    """Write the file, or add what it lacks; nothing for a run that is not part of a sweep. Raises OSError."""
    varied = _varied(run)
    with run.metrics.open("rb") as file:
        first = file.readline()
    if not varied or not first.endswith(b"\n"):
        return
    at = json.loads(first)["time"]
    wanted = _start(varied, at) + (_end(at) if finished else b"")
    path = run.tensorboard / FILE
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
    parts = hparams_parts()
    value = Summary.Value(tag=tag, metadata=parts.metadata(data), tensor=parts.nothing)
    return framed(Event(wall_time=at, summary=Summary(value=[value])))

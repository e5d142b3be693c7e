"""TensorBoard's event files, as a copy of metrics.jsonl. To import this is to import tensorboard.

These parts of tensorboard do without tensorflow. Its EventFileWriter, and so torch's SummaryWriter, would import it
wherever it is installed.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.compat import event_file_parts
from trainer.records.metrics import is_step

Event, SessionLog, Summary, RecordWriter = event_file_parts()

PLACE = ("step", "epoch", "time", "skipped")  # of a line of metrics.jsonl, all else is shown
LINES = 200  # of metrics.jsonl, between two pauses


@dataclass(frozen=True)
class Point:
    """What is shown at one step: of the step itself, or of the epoch that it ended."""

    step: int
    time: float  # Unix seconds
    values: dict[str, float]  # by tag
    ends_epoch: bool = False

    def record(self) -> bytes:
        """What stands in an event file for it: the same bytes whoever writes it."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in self.values.items()])
        return _framed(Event(wall_time=self.time, step=self.step, summary=summary))

    def header(self) -> bytes:
        """What stands before it where it is the first of its file. A TensorBoard that has read other points from there
        on forgets them."""
        # The last step of an epoch may have its own point in the file before.
        forget = self.step + 1 if self.ends_epoch else self.step
        start = Event(wall_time=self.time, step=forget, session_log=SessionLog(status=SessionLog.START))
        return _framed(Event(wall_time=self.time, file_version="brain.Event:2")) + _framed(start)


class Points:
    """What is shown of a metrics.jsonl: every `log_every`-th step, and every epoch. To iterate again is to go on."""

    def __init__(self, path: Path, log_every: int, pause: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._log_every = log_every
        self._pause = pause
        self._offset = 0
        self._time = 0.0  # of the newest step: an epoch's line has none

    def __iter__(self) -> Iterator[Point]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # it is just being written
                self._offset += len(line)
                if point := self._point(json.loads(line)):
                    yield point
                if number % LINES == 0:
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
        # JSON has no NaN; TensorBoard marks where there was one.
        numbers = {tag: math.nan if value is None else value for tag, value in values.items()}
        return Point(line["step"], self._time, numbers, ends_epoch)


def fit(files: Sequence[Path], points: Iterator[Point]) -> Iterator[Point]:
    """Cut the files, one after the other, where they hold anything but these points; returns the points that are
    missing. Raises OSError."""
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
    """Where a value of an epoch is shown."""
    if name == "train_loss":
        return "train/epoch_loss"
    return name.replace("_", "/", 1) if name.startswith("val_") else f"epoch/{name}"


def _framed(event: Any) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()

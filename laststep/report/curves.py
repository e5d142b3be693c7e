"""The curves of a run, read from its metrics.jsonl in one pass: of bounded size for any number of steps."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laststep.records.metrics import VALIDATED, is_step

MAX_POINTS = 4096  # per curve: enough to zoom into; page.js merges them further to fit the screen


@dataclass(slots=True)
class Point:
    """Neighbouring values of a curve: their range of steps or epochs, and their minimum, mean and maximum."""

    first: int
    last: int
    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    bad: int = 0  # how many values were not finite, or belong to a skipped step

    @property
    def mean(self) -> float:
        """The mean of its finite values."""
        return self.total / self.count

    def merge(self, other: Point) -> None:
        """Add the values of another point."""
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count += other.count
        self.total += other.total
        self.bad += other.bad


class Curve:
    """Values by step or by epoch.

    When there are more than MAX_POINTS points, each two neighbours are merged. Every finite value counts in the mean of
    its point, and lies between the point's minimum and maximum.
    """

    def __init__(self) -> None:
        self.width = 1  # steps or epochs per point
        self._points: dict[int, Point] = {}

    def add(self, x: int, value: object, bad: bool = False) -> None:
        """Add the value of a step or epoch; a value that is not a finite number counts as bad."""
        number = (x - 1) // self.width
        while number >= MAX_POINTS:
            self._halve()
            number = (x - 1) // self.width
        point = self._points.get(number)
        if point is None:
            point = self._points[number] = Point(x, x)
        point.last = x
        if isinstance(value, (int, float)) and math.isfinite(value):
            point.count += 1
            point.total += value
            point.low = min(point.low, value)
            point.high = max(point.high, value)
        else:
            bad = True
        point.bad += bad

    @property
    def points(self) -> list[Point]:
        """The points in order. A point without a finite value has a count of 0."""
        return [point for _, point in sorted(self._points.items())]

    def _halve(self) -> None:
        """Merge each two neighbouring points."""
        self.width *= 2
        old, self._points = self._points, {}
        for number, point in sorted(old.items()):
            if number // 2 in self._points:
                self._points[number // 2].merge(point)
            else:
                self._points[number // 2] = point


@dataclass
class Curves:
    """The curves of a run, and the other values that the report takes from its metrics.jsonl."""

    loss: Curve = field(default_factory=Curve)  # by step
    throughput: Curve = field(default_factory=Curve)  # samples/s, by step
    validation: dict[str, Curve] = field(default_factory=dict)  # by name, e.g. val_loss; by epoch
    validation_by_step: dict[str, Curve] = field(default_factory=dict)  # the same
    validated_within_epochs: bool = False  # more than once in an epoch
    final: Mapping[str, Any] = field(default_factory=dict)  # the line of the newest epoch
    newest: Mapping[str, Any] = field(default_factory=dict)  # the line of the newest step
    done_at: dict[int, float] = field(default_factory=dict)  # step -> Unix seconds, for the requested steps

    @property
    def last_step_at(self) -> float | None:
        """Unix seconds of the newest step."""
        return self.newest.get("time")


def read_curves(path: Path, steps: Collection[int]) -> Curves:
    """Read a metrics.jsonl. `steps` are the steps whose time is wanted. Damaged lines are skipped."""
    curves, wanted = Curves(), frozenset(steps)
    try:
        file = path.open(errors="replace")
    except FileNotFoundError:
        return curves
    with file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if not isinstance(line, dict):
                continue
            if is_step(line):
                _add_step(curves, line, wanted)
            elif "epoch" in line:
                _add_epoch(curves, line)
    return curves


def _add_step(curves: Curves, line: Mapping[str, Any], wanted: frozenset[int]) -> None:
    step = line["step"]
    if "loss" in line:  # a custom training loop may not log it
        curves.loss.add(step, line["loss"], bad="skipped" in line)
    curves.throughput.add(step, line["samples_per_s"])
    curves.newest = line
    if step in wanted:
        curves.done_at[step] = line["time"]


def _add_epoch(curves: Curves, line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if name.startswith(VALIDATED):
            curves.validation.setdefault(name, Curve()).add(line["epoch"], value)
            curves.validation_by_step.setdefault(name, Curve()).add(line["step"], value)
            curves.validated_within_epochs |= name in curves.final and curves.final["epoch"] == line["epoch"]
    curves.final = line

"""What metrics.jsonl tells, read once: curves of bounded size, however many steps the run has."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.records.metrics import StepLine, is_step

MOST_POINTS = 240  # of a curve: one every four pixels or so on a wide screen


@dataclass(slots=True)
class Point:
    """Neighbouring values of a curve: where they are, the smallest, their mean, the largest."""

    first: int
    last: int
    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    flaws: int = 0  # so many steps whose loss or gradient was not finite

    @property
    def x(self) -> float:
        """The middle of where its values are."""
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        """Mean of its values."""
        return self.total / self.count

    def take_in(self, other: Point) -> None:
        """Become the point for both."""
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count += other.count
        self.total += other.total
        self.flaws += other.flaws


class Curve:
    """Values by step or by epoch. While they come in, points are joined two and two whenever they get too many: each
    value counts in the mean of its point, and none falls outside of a smallest and a largest."""

    def __init__(self) -> None:
        self.width = 1  # steps or epochs to a point
        self._points: dict[int, Point] = {}

    def add(self, x: int, value: Any, flaw: bool = False) -> None:
        """Enter a value; one that is no finite number is a flaw."""
        number = (x - 1) // self.width
        while number >= MOST_POINTS:
            self._join()
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
            flaw = True
        point.flaws += flaw

    @property
    def points(self) -> list[Point]:
        """The points in order; one whose values are all flaws has a count of 0."""
        return [point for _, point in sorted(self._points.items())]

    def _join(self) -> None:
        self.width *= 2
        old, self._points = self._points, {}
        for number, point in sorted(old.items()):
            if number // 2 in self._points:
                self._points[number // 2].take_in(point)
            else:
                self._points[number // 2] = point


@dataclass
class Curves:
    """The curves of a run, and what else its metrics.jsonl tells."""

    loss: Curve = field(default_factory=Curve)  # by step
    throughput: Curve = field(default_factory=Curve)  # samples/s, by step
    validation: dict[str, Curve] = field(default_factory=dict)  # by name, e.g. val_loss; by epoch
    final: dict[str, Any] = field(default_factory=dict)  # the newest epoch's line
    done_at: dict[int, float] = field(default_factory=dict)  # Unix seconds of the steps that were asked for
    last_sign: float | None = None  # Unix seconds of the newest step


def read_curves(path: Path, steps: Collection[int]) -> Curves:
    """Read a metrics.jsonl line by line, and pass over one cut short; `steps` are those whose time is asked for."""
    curves, wanted = Curves(), frozenset(steps)
    try:
        file = path.open(errors="replace")
    except FileNotFoundError:
        return curves
    with file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                continue
            if is_step(record):
                _enter_step(curves, record, wanted)
            elif "epoch" in record:
                _enter_epoch(curves, record)
    return curves


def _enter_step(curves: Curves, record: StepLine, wanted: frozenset[int]) -> None:
    step = record["step"]
    if "loss" in record:  # a loop of one's own need not log it
        curves.loss.add(step, record["loss"], "skipped" in record)
    curves.throughput.add(step, record["samples_per_s"])
    curves.last_sign = record["time"]
    if step in wanted:
        curves.done_at[step] = record["time"]


def _enter_epoch(curves: Curves, record: dict[str, Any]) -> None:
    for name, value in record.items():
        if name.startswith("val_"):
            curves.validation.setdefault(name, Curve()).add(record["epoch"], value)
    curves.final = record

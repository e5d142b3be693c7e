"""The curves of a run, read from its metrics.jsonl in one pass: of bounded size for any number of steps. And their
figures: the frames as HTML, and the data from which page.js draws them with plotly."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from laststep.records.metrics import VALIDATED, is_step

SCRIPT = Path(__file__).with_name("page.js")
COLOURS = 6  # run-0 to run-5 in page.css
DASHES = 3  # dash-0 to dash-2
LOG_FROM = 30.0  # a linear axis would hide the end of a loss that falls by more than this factor
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


@dataclass(frozen=True)
class Figure:
    """One figure, with one curve for each run that has one."""

    title: str
    unit: str  # of the x axis: step or epoch
    curves: Sequence[Curve | None]
    y_unit: str = ""
    is_loss: bool = False  # its axis can be logarithmic
    from_zero: bool = False  # its axis begins at zero

    @property
    def html(self) -> str:
        """The frame that page.js fills."""
        title = escape(self.title)
        scale = '<button type="button" title="linear or logarithmic axis"></button>' if self.is_loss else ""
        return (
            f"<figure><figcaption><h3>{title}</h3>{scale}</figcaption>\n"
            f'<div class="plot" role="img" aria-label="{title} by {self.unit}"></div>\n<p class="note"></p></figure>\n'
        )

    @property
    def data(self) -> dict[str, Any]:
        """Its data for page.js."""
        curves = [(run, curve) for run, curve in enumerate(self.curves) if curve]
        return {
            "unit": self.unit,
            "y_unit": self.y_unit,
            "log": self.is_loss and self._falls_far(),
            "from_zero": self.from_zero,
            "lines": [{"run": run, "rows": [_row(point) for point in curve.points]} for run, curve in curves],
        }

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return any(curve.points for curve in self.curves if curve)

    def _falls_far(self) -> bool:
        """Whether the finite values are positive, and the largest is far above the smallest."""
        points = [point for curve in self.curves if curve for point in curve.points if point.count]
        low, high = min((p.low for p in points), default=0.0), max((p.high for p in points), default=0.0)
        return low > 0 and high > LOG_FROM * low


def draw(figures: Sequence[Figure], runs: Sequence[tuple[str, Sequence[tuple[int, str, int]]]]) -> str:
    """The figures with everything that draws them, as HTML. `runs` are the runs' names and attempts: the number of
    each, the reason of its end, and its first step."""
    from plotly.offline import get_plotlyjs

    shown = [{"name": name, "attempts": attempts} for name, attempts in runs]
    data = json.dumps({"runs": shown, "figures": [figure.data for figure in figures]}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # so that no text ends the element
    return (
        f'<section class="figures">\n{"".join(figure.html for figure in figures)}</section>\n'
        f'<script type="application/json" id="curves">{data}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>\n{SCRIPT.read_text()}</script>\n"
    )


def colour(run: int) -> str:
    """The CSS classes for the colour of a run; when all colours are used up, the lines are dashed."""
    return f"run-{run % COLOURS} dash-{run // COLOURS % DASHES}"


def legend(names: Sequence[str]) -> str:
    """The names of several runs with their colours: buttons that hide a run and show it again."""
    items = (
        f'<li class="{colour(run)}"><button type="button" aria-pressed="true">'
        f'<svg><use href="#swatch"/></svg>{escape(name)}</button></li>'
        for run, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _row(point: Point) -> list[float]:
    """A point as page.js reads it; six digits of a value are enough for a picture."""
    values = [float(f"{value:.6g}") for value in (point.mean, point.low, point.high)] if point.count else [0.0] * 3
    return [point.first, point.last, point.count, point.bad, *values]

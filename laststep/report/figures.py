"""The figures of the curves: their frames as HTML, and the data from which page.js draws them with plotly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from laststep.report.curves import Curve, Point
from laststep.report.timeline import ShownAttempt

SCRIPT = Path(__file__).with_name("page.js")
COLOURS = 6  # run-0 to run-5 in page.css
DASHES = 3  # dash-0 to dash-2
LOG_FROM = 30.0  # a linear axis would hide the end of a loss that falls by more than this factor


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


def html(figures: Sequence[Figure], runs: Sequence[tuple[str, Sequence[ShownAttempt]]]) -> str:
    """The figures with everything that draws them, as HTML. `runs` are the runs' names and attempts."""
    from plotly.offline import get_plotlyjs

    shown = [
        {"name": name, "attempts": [(a.number, a.reason, a.start_step) for a in attempts]} for name, attempts in runs
    ]
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

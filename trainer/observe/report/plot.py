"""One figure of curves, drawn as SVG.

Positions are percentages, but the sizes of text and strokes are not: the figure fits the width of a screen, a phone or
paper, and stays readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trainer.observe.report.curves import Curve
from trainer.observe.report.scale import LOG_FROM, Axis

COLOURS = 6  # run-0 to run-5 in page.css
DASHES = 3  # dash-0 to dash-2
MAX_FULL_LINES = 20  # ends of attempts; if there are more, they are marked only at the foot of the figure
MAX_DOTS = 40  # a curve of at most this many points has a dot for each, so that a single point is visible


@dataclass(frozen=True)
class Line:
    """The curve of a run; `run` is the number of its colour."""

    run: int
    curve: Curve


def figure(
    title: str, unit: str, lines: Sequence[Line], axis: Callable[[list[float]], Axis], ends: Sequence[int]
) -> str:
    """A figure with one curve per run, as HTML; empty when no curve has a point. `unit` is that of the x axis, step or
    epoch. `axis` makes the y axis. `ends` are the steps at which an attempt ended and the next one continued."""
    lines = [line for line in lines if line.curve.points]
    if not lines:
        return ""
    points = [point for line in lines for point in line.curve.points]
    x = Axis.along(value for point in points for value in (point.first, point.last))
    y = axis([value for point in points if point.count for value in (point.low, point.high)] or [0.0, 1.0])
    marked = [at for at in ends if x.low <= at <= x.high]
    foot = 0 if len(marked) <= MAX_FULL_LINES else 92
    body = [
        *(f'<line class="grid" x1="0" x2="100%" y1="{_y_percent(y, at)}" y2="{_y_percent(y, at)}"/>' for at in y.ticks),
        *(
            f'<line class="end" y1="{foot}%" y2="100%" x1="{_x_percent(x, at)}" x2="{_x_percent(x, at)}"/>'
            for at in marked
        ),
        *(_draw(line, x, y) for line in lines),
        *(f'<text class="y" x="-8" y="{_y_percent(y, at)}" dy=".35em">{text}</text>' for at, text in y.marks),
        *(f'<text class="x" x="{_x_percent(x, at)}" y="100%" dy="1.5em">{text}</text>' for at, text in x.marks),
    ]
    by = f"by {unit}, logarithmic" if y.log else f"by {unit}"
    return (
        f"<figure><figcaption><h3>{escape(title)} <small>{by}</small></h3></figcaption>\n"
        f'<div class="plot"><svg role="img" aria-label="{escape(title)} {by}">{"".join(body)}</svg></div>\n'
        f"{_notes(lines, unit, bool(marked))}</figure>\n"
    )


def colour(run: int) -> str:
    """The CSS classes for the colour of a run; when all colours are used up, the lines are dashed."""
    return f"run-{run % COLOURS} dash-{run // COLOURS % DASHES}"


def legend(names: Sequence[str]) -> str:
    """The names of several runs with their colours."""
    items = (
        f'<li class="{colour(run)}"><svg><use href="#swatch"/></svg>{escape(name)}</li>'
        for run, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def loss_axis(values: list[float]) -> Axis:
    """The y axis of a loss: logarithmic if the loss falls by a factor of more than LOG_FROM."""
    if min(values) > 0 and max(values) > LOG_FROM * min(values):
        return Axis.up_log(values)
    return Axis.up(values)


def _draw(line: Line, x: Axis, y: Axis) -> str:
    """The band from minimum to maximum, and the line of the means in front of it."""
    points = [point for point in line.curve.points if point.count]
    band = ""
    if line.curve.width > 1:
        edge = [(point.x, point.high) for point in points] + [(point.x, point.low) for point in reversed(points)]
        band = f'<polygon class="band" points="{_path(edge, x, y)}"/>'
    means = _path(((point.x, point.mean) for point in points), x, y)
    dots = ""
    if len(points) <= MAX_DOTS:
        dots = "".join(
            f'<circle class="dot" r="3" cx="{_x_percent(x, point.x)}" cy="{_y_percent(y, point.mean)}">'
            f"<title>{point.x:g}: {point.mean:.6g}</title></circle>"
            for point in points
        )
    crosses = "".join(
        f'<use href="#bad" class="bad" x="{_x_percent(x, point.x)}" width="10" height="10" transform="translate(-5)"/>'
        for point in line.curve.points
        if point.bad
    )
    return (
        f'<g class="{colour(line.run)}">'
        f'<svg width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none">{band}'
        f'<polyline class="curve" points="{means}"/></svg>{dots}{crosses}</g>'
    )


def _path(at: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    return " ".join(f"{10 * x.at(a):.1f},{1000 - 10 * y.at(b):.1f}" for a, b in at)


def _x_percent(x: Axis, value: float) -> str:
    return f"{x.at(value):.2f}%"


def _y_percent(y: Axis, value: float) -> str:
    return f"{100 - y.at(value):.2f}%"


def _notes(lines: Sequence[Line], unit: str, ends: bool) -> str:
    """How to read the figure."""
    width = max(line.curve.width for line in lines)
    bad = sum(point.bad for line in lines for point in line.curve.points)
    notes = [
        f"Line: mean of {width} {unit}s; band: minimum to maximum." if width > 1 else "",
        "Dotted: the end of an attempt." if ends else "",
        f"Crosses: {bad:,} values that are not finite or were skipped." if bad else "",
    ]
    text = " ".join(filter(None, notes))
    return f'<p class="note">{text}</p>' if text else ""

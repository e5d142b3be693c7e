"""The page itself: one HTML file that refers to no other file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

from trainer.observe.progress import duration
from trainer.observe.report.curves import Curve, Curves
from trainer.observe.report.plot import Line, colour, figure, legend, loss_axis
from trainer.observe.report.scale import Axis
from trainer.observe.report.timeline import Timeline, steps
from trainer.records.attempt_record import AttemptRecord

STYLE = Path(__file__).with_name("page.css")
FAMILY_OF_STATE = {"finished": "good", "running": "good", "failed": "fault", "lost": "fault"}
# Keys that always differ between runs.
RUN_KEYS = ("launch.name", "launch.root")
# The shapes: a disc with a sign for each end of an attempt, a cross for bad values, a legend's line, two hatchings.
DISC = '<symbol id="end-{}" viewBox="0 0 16 16"><circle cx="8" cy="8" r="8" fill="currentColor"/>{}</symbol>'
SIGNS = {
    "finished": "M4.5 8.5 7 11 11.5 5.5",
    "in-progress": "M6.5 5 10.5 8 6.5 11Z",
    "preempted": "M6 5V11M10 5V11",
    "timeout": "M8 4V8L10.5 10",
    "cancelled": "M5.5 5.5H10.5V10.5H5.5Z",
    "failed": "M5.5 5.5 10.5 10.5M10.5 5.5 5.5 10.5",
    "hung": "M4.5 8H4.6M8 8H8.1M11.4 8H11.5",
    "lost": "M8 4V9M8 11.6V11.7",
}
SHAPES = (
    '<svg class="shapes" aria-hidden="true">'
    + "".join(DISC.format(reason, f'<path class="glyph" d="{path}"/>') for reason, path in SIGNS.items())
    + '<symbol id="bad" viewBox="0 0 10 10"><path d="M1 1 9 9M9 1 1 9"/></symbol>'
    '<symbol id="swatch" viewBox="0 0 22 11"><line class="swatch" x2="22" y1="5.5" y2="5.5"/></symbol>'
    '<pattern id="hatch-lost" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="6" fill="var(--lost)"/></pattern>'
    '<pattern id="hatch-queued" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect width="1" height="6" fill="var(--soft)"/></pattern></svg>'
)


@dataclass(frozen=True)
class Run:
    """The data of a run that the report shows."""

    name: str
    state: str  # the word that `launch.py status` shows for it
    why: str  # more about its state; may be empty
    alive: bool  # whether an attempt without an end is in progress, rather than killed
    step: int | None
    total_steps: int | None
    records: Sequence[AttemptRecord]
    curves: Curves
    config: Mapping[str, object]  # the configuration, flat: optim.lr -> 0.1
    yaml: str  # the text of config.yaml

    @property
    def timeline(self) -> Timeline:
        """Its attempts, each with an end."""
        return Timeline.of(self.records, self.alive, time.time(), self.curves.last_step_at)

    @property
    def facts(self) -> dict[str, str]:
        """The figures at the top of the page: name -> text."""
        step = "-" if self.step is None else steps(self.step)
        final = {name: value for name, value in self.curves.final.items() if name not in ("epoch", "step")}
        attempts = self.timeline.attempts
        lost = [attempt.lost_steps for attempt in attempts if attempt.lost_steps is not None]
        return {
            "step": f"{step} of {self.total_steps:,}" if self.total_steps else step,
            **{_label(name): "not finite" if value is None else f"{value:.4g}" for name, value in final.items()},
            "attempts": f"{len(self.records):,}",
            "lost steps": steps(sum(lost) if len(lost) == len(attempts) else None),
            "time in attempts": duration(sum(attempt.seconds for attempt in attempts)),
        }


def page(runs: Sequence[Run]) -> str:
    """The report of these runs."""
    title = ", ".join(run.name for run in runs)
    one = len(runs) == 1
    body = _head(runs[0]) if one else _comparison(runs)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text()}</style>\n</head>\n<body>\n{SHAPES}\n"
        f"<header>{body}</header>\n<main>\n{_figures(runs)}"
        f"{''.join(_attempts(run, '' if one else run.name) for run in runs)}{_yaml(runs[0]) if one else ''}</main>\n"
        f"<footer>Laststep, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}; times are local.</footer>\n</body>\n</html>\n"
    )


def _head(run: Run) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in run.facts.items())
    return (
        f'<div class="top"><h1>{escape(run.name)}</h1>{_state(run)}</div>\n<p class="sub">{escape(_about(run))}</p>\n'
        f'<dl class="facts">{facts}</dl>'
    )


def _state(run: Run) -> str:
    family = FAMILY_OF_STATE.get(run.state, "orderly")
    why = f'<span class="sub">{escape(run.why)}</span>' if run.why else ""
    return f'<span class="state {family}">{escape(run.state)}</span>{why}'


def _about(run: Run) -> str:
    """The task and its main settings, in one line."""
    get = run.config.get
    task = f"{get('model.name')} on {get('data.name')}" if get("task") == "classification" else str(get("task"))
    return f"{task}, {get('optim.name')}, lr {get('optim.lr')}, batch {get('train.batch_size')}, seed {get('seed')}"


def _comparison(runs: Sequence[Run]) -> str:
    """The runs side by side: their states and results, and the keys in which their configurations differ."""
    rows: dict[str, list[str]] = {"state": [_state(run) for run in runs]}
    for name in dict.fromkeys(name for run in runs for name in run.facts):
        rows[name] = [escape(run.facts.get(name, "-")) for run in runs]
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [str(run.config.get(key)) for run in runs]
        if len(set(values)) > 1 and key not in RUN_KEYS:
            rows[key] = [escape(value) for value in values]
    head = "".join(
        f'<th class="{colour(number)}"><svg><use href="#swatch"/></svg>{escape(run.name)}</th>'
        for number, run in enumerate(runs)
    )
    lines = (
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{value}</td>" for value in row)}</tr>\n'
        for name, row in rows.items()
    )
    return (
        f"<h1>{len(runs)} runs</h1>\n"
        f'<div class="wide runs"><table><thead><tr><th></th>{head}</tr></thead>\n'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _figures(runs: Sequence[Run]) -> str:
    def lines(curves: Sequence[Curve | None]) -> list[Line]:
        return [Line(number, curve) for number, curve in enumerate(curves) if curve]

    ends = [record["end_step"] - record["lost_steps"] for record in runs[0].records[:-1]] if len(runs) == 1 else []
    loss = figure("Training loss", "step", lines([run.curves.loss for run in runs]), loss_axis, ends)
    validated = dict.fromkeys(name for run in runs for name in run.curves.validation)
    validation = [
        figure(
            _label(name).capitalize(),
            "epoch",
            lines([run.curves.validation.get(name) for run in runs]),
            loss_axis if name == "val_loss" else Axis.up,
            [],
        )
        for name in validated
    ]
    from_zero = partial(Axis.up, from_zero=True)
    speed = figure("Throughput, samples/s", "step", lines([run.curves.throughput for run in runs]), from_zero, ends)
    drawn = "".join([loss, *validation, speed])
    if not drawn:
        return '<h2>Curves</h2>\n<p class="empty">metrics.jsonl has no steps yet, so there are no curves.</p>\n'
    names = legend([run.name for run in runs]) if len(runs) > 1 else ""
    return f'<h2>Curves</h2>\n{names}<section class="figures">\n{drawn}</section>\n'


def _attempts(run: Run, name: str) -> str:
    title = f"Attempts of {escape(name)}" if name else "Attempts"
    if not run.records:
        return f'<section class="run"><h2>{title}</h2>\n<p class="empty">No attempt has started yet.</p></section>\n'
    timeline = run.timeline
    return (
        f'<section class="run"><h2>{title}</h2>\n{timeline.picture(run.curves.done_at)}{timeline.table()}</section>\n'
    )


def _yaml(run: Run) -> str:
    return f"<details><summary>Configuration</summary><pre>{escape(run.yaml)}</pre></details>\n"


def _label(name: str) -> str:
    """val_accuracy -> validation accuracy"""
    return name.replace("val_", "validation ", 1).replace("train_", "training ", 1).replace("_", " ")

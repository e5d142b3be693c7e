"""The page itself: one HTML file that refers to no other file."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

from laststep.config.keep import Ranking
from laststep.config.schema import READY_MADE
from laststep.records.attempt_record import AttemptRecord, start_of
from laststep.records.progress import duration
from laststep.records.submissions import SubmissionRecord
from laststep.report.curves import Curve, Curves, Figure, colour, draw, legend
from laststep.runs.run_status import RunStatus, TimeSplit
from laststep.say import counted

STYLE = Path(__file__).with_name("page.css")
FAMILY_OF_STATE = {"finished": "good", "running": "good", "failed": "fault", "lost": "fault"}
# Keys that always differ between runs.
RUN_KEYS = ("launch.name", "launch.root")
# The shapes: a disc with a sign for each end of an attempt, a legend's line, two hatchings.
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
    + '<symbol id="swatch" viewBox="0 0 22 11"><line class="swatch" x2="22" y1="5.5" y2="5.5"/></symbol>'
    '<pattern id="hatch-lost" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="6" fill="var(--lost)"/></pattern>'
    '<pattern id="hatch-queued" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect width="1" height="6" fill="var(--soft)"/></pattern></svg>'
)
# The classes of page.css, which the timeline uses too.
CLASS = {"training": "running", "queue": "queued", "restarts": "restarting", "lost steps": "lost", "saves": "saving"}
HEIGHT_PX = 14
SIDE_BY_SIDE = 4  # runs; more of them are rows of a table


class Fact(NamedTuple):
    """A figure at the top of the page."""

    text: str
    of: str = ""  # the step or epoch that it belongs to, or what it is a share of

    @property
    def html(self) -> str:
        """The figure, and in small print what it belongs to."""
        return escape(self.text) + (f" <small>{escape(self.of)}</small>" if self.of else "")


@dataclass(frozen=True)
class Run:
    """The data of a run that the report shows."""

    status: RunStatus  # as `launch.py status` shows it
    time: TimeSplit
    records: Sequence[AttemptRecord]
    submissions: Sequence[SubmissionRecord]
    curves: Curves
    config: Mapping[str, object]  # the configuration, flat: optim.lr -> 0.1
    yaml: str  # the text of config.yaml
    figures: Mapping[str, Curve] = field(default_factory=dict)  # of the rooms, by title; by step
    more: Mapping[str, str] = field(default_factory=dict)  # facts of the rooms, by name
    links: Mapping[str, str] = field(default_factory=dict)  # where else the run can be looked at, by name

    @property
    def name(self) -> str:
        """Its name."""
        return self.status.run

    @property
    def attempts(self) -> list[ShownAttempt]:
        """Its attempts, each with an end."""
        now, last_step_at = time.time(), self.curves.newest.get("time")
        return [ShownAttempt.of(record, self.status.alive, now, last_step_at) for record in self.records]

    @property
    def facts(self) -> dict[str, Fact]:
        """The figures at the top of the page, by name."""
        status, attempts = self.status, self.attempts
        step = "-" if status.step is None else steps(status.step)
        lost = [attempt.lost_steps for attempt in attempts if attempt.lost_steps is not None]
        return {
            "step": Fact(f"{step} of {status.total_steps:,}" if status.total_steps else step),
            **self._results,
            "attempts": Fact(f"{len(self.records):,}"),
            "lost steps": Fact(steps(sum(lost) if len(lost) == len(attempts) else None)),
            "time in attempts": Fact(duration(sum(attempt.seconds for attempt in attempts))),
            "goodput": Fact("-")
            if status.goodput is None
            else Fact(f"{status.goodput:.0%}", "of the time in attempts"),
            **{name: Fact(text) for name, text in self.more.items()},
        }

    @property
    def _results(self) -> dict[str, Fact]:
        """The figures of the newest epoch and of the newest step, by name."""
        epoch, step = self.curves.final, self.curves.newest
        found = {}
        for name, value in epoch.items():
            if name not in ("epoch", "step"):
                of = "mean of epoch" if name.startswith("train_") else "epoch"
                found[_label(name)] = Fact(_number(value), f"{of} {epoch['epoch']:,}")
        for name, label in (("loss", "training loss"), ("lr", "learning rate")):
            if name in step:
                found.setdefault(label, Fact(_number(step[name]), f"step {step['step']:,}"))
        return found


def page(runs: Sequence[Run]) -> str:
    """The report of these runs: one, a few as columns side by side, or many as the rows of a table, best first."""
    one, many = len(runs) == 1, len(runs) > SIDE_BY_SIDE
    if many:
        ranking = Ranking.parse(str(runs[0].config["checkpoint.best_by"]))
        runs = sorted(runs, key=lambda run: _rank(ranking.badness(run.curves.final)))
        head = _ranked(runs, ranking)
    else:
        head = _head(runs[0]) if one else _comparison(runs)
    title, wide = ", ".join(run.name for run in runs), ' class="many"' * many
    attempts = "<h2>Attempts</h2>\n" * many
    attempts += "".join(_folded(run) if many else _attempts(run, "" if one else run.name) for run in runs)
    more = ""
    if one:
        more = (
            f"{_starts(runs[0])}<details><summary>Configuration</summary><pre>{escape(runs[0].yaml)}</pre></details>\n"
        )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text()}</style>\n</head>\n<body{wide}>\n{SHAPES}\n"
        f"<header>{head}</header>\n<main>\n{_figures(runs)}{attempts}{more}</main>\n"
        f"<footer>Laststep, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}; times are local.</footer>\n</body>\n</html>\n"
    )


def _head(run: Run) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{fact.html}</dd></div>" for name, fact in run.facts.items())
    return (
        f'<div class="top"><h1>{escape(run.name)}</h1>{_state(run)}</div>\n<p class="sub">{escape(_about(run))}</p>\n'
        f'{_links(run)}<dl class="facts">{facts}</dl>'
    )


def _links(run: Run) -> str:
    """The pages of the run's trackers."""
    links = [
        f'<a href="{escape(place)}">{escape(name)}</a>'
        for name, place in run.links.items()
        if place.startswith(("http://", "https://"))
    ]
    return f'<p class="sub">{", ".join(links)}</p>\n' if links else ""


def _state(run: Run) -> str:
    status = run.status
    family = FAMILY_OF_STATE.get(status.state, "orderly")
    why = f'<span class="sub">{escape(status.why)}</span>' if status.why else ""
    return f'<span class="state {family}">{escape(status.state)}</span>{why}'


def _about(run: Run) -> str:
    """The task and its main settings, in one line."""
    get = run.config.get
    task = f"{get('model.name')} on {get('data.name')}" if get("task") in READY_MADE else str(get("task"))
    return f"{task}, {get('optim.name')}, lr {get('optim.lr')}, batch {get('train.batch_size')}, seed {get('seed')}"


def _comparison(runs: Sequence[Run]) -> str:
    """The runs side by side: their states and results, their learning rates, and the keys in which they differ."""
    rows: dict[str, list[str]] = {"state": [_state(run) for run in runs]}
    for name in dict.fromkeys(name for run in runs for name in run.facts):
        rows[name] = [run.facts.get(name, Fact("-")).html for run in runs]
    rows |= {key: [escape(value) for value in values] for key, values in _settings(runs, "optim.lr").items()}
    rows["command"] = [f"<code>{_command(run.submissions[0])}</code>" if run.submissions else "-" for run in runs]
    rows["commit"] = [escape(", ".join(_commits(run.submissions)) or "-") for run in runs]
    heads = [_name(number, run, "col") for number, run in enumerate(runs)]
    lines = ((f'<th scope="row">{escape(name)}</th>', row) for name, row in rows.items())
    return f"<h1>{counted(len(runs), 'run')}</h1>\n{_table(['<th></th>', *heads], lines, 'runs')}"


def _ranked(runs: Sequence[Run], ranking: Ranking) -> str:
    """A table with a row per run, and what the runs have in common once."""
    facts = [run.facts for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    best, settings = _label(ranking.metric), _settings(runs)
    results = sorted((name for name in runs[0]._results if name != best), key=names.index)
    columns: dict[str, list[str]] = {"state": [_state(run) for run in runs]}
    columns |= {
        escape(key).replace(".", ".<wbr/>"): [escape(value) for value in values] for key, values in settings.items()
    }
    for name in [*([best] if best in names else []), *results, *(n for n in names if n != best and n not in results)]:
        column = [each.get(name, Fact("-")) for each in facts]
        of = {fact.of for fact in column if fact.text != "-"}
        if len(of) == 1:  # said once, in the title
            columns[Fact(name, of.pop()).html] = [escape(fact.text) for fact in column]
        else:
            columns[escape(name)] = [fact.html for fact in column]
    commits = [", ".join(_commits(run.submissions)) or "-" for run in runs]
    if len(set(commits)) > 1:
        columns["commit"] = [escape(each) for each in commits]
    lines = (
        (_name(number, run, "row"), [column[number] for column in columns.values()]) for number, run in enumerate(runs)
    )
    typed = dict.fromkeys(_command(run.submissions[0]) for run in runs if run.submissions)
    commands = "".join(f"<p><code>{command}</code></p>\n" for command in typed)
    if len(typed) > 1:
        commands = f"<details><summary>{counted(len(typed), 'command')}</summary>{commands}</details>\n"
    common = "" if len(set(commits)) > 1 or commits[0] == "-" else f"; commit {escape(commits[0])}"
    return (
        f'<h1>{counted(len(runs), "run")}</h1>\n<p class="sub">sorted by the {escape(str(ranking))}{common}</p>\n'
        f"{commands}{_table(_titles('run', *columns), lines, 'runs ranked')}"
    )


def _rank(badness: float) -> tuple[bool, float]:
    """The key to sort by: runs without a result last."""
    return (True, 0.0) if math.isnan(badness) else (False, badness)


def _settings(runs: Sequence[Run], *always: str) -> dict[str, list[str]]:
    """The keys in which the runs differ, and those of `always`, with the value of each run."""
    found = {}
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [str(run.config.get(key)) for run in runs]
        if key in always or (len(set(values)) > 1 and key not in RUN_KEYS):
            found[key] = values
    return found


def _name(number: int, run: Run, scope: str) -> str:
    """The head of a run's column or row, with the colour of its curves."""
    swatch = '<svg><use href="#swatch"/></svg>'
    return f'<th scope="{scope}" class="{colour(number)}">{swatch}{escape(run.name)}</th>'


def _folded(run: Run) -> str:
    """The attempts of one of many runs, behind a line."""
    count = counted(len(run.records), "attempt")
    return f'<details class="fold"><summary>{escape(run.name)}: {count}</summary>{_attempts(run, run.name)}</details>\n'


def _figures(runs: Sequence[Run]) -> str:
    validated = dict.fromkeys(name for run in runs for name in run.curves.validation)
    by_step = any(run.curves.validated_within_epochs for run in runs)
    figures = [
        Figure("Training loss", "step", [run.curves.loss for run in runs], is_loss=True),
        *(
            Figure(
                _label(name).capitalize(),
                "step" if by_step else "epoch",
                [(run.curves.validation_by_step if by_step else run.curves.validation).get(name) for run in runs],
                is_loss=name.endswith("loss"),
            )
            for name in validated
        ),
        Figure("Throughput", "step", [run.curves.throughput for run in runs], y_unit="samples/s", from_zero=True),
        *(
            Figure(title, "step", [run.figures.get(title) for run in runs], from_zero=True)
            for title in dict.fromkeys(title for run in runs for title in run.figures)
        ),
    ]
    figures = [figure for figure in figures if figure.has_points]
    if not figures:
        return '<h2>Curves</h2>\n<p class="empty">metrics.jsonl has no steps yet, so there are no curves.</p>\n'
    several = len(runs) > 1
    how = "Drag to zoom in, double-click to zoom out." + " Click a name to hide that run." * several
    names = legend([run.name for run in runs]) if several else ""
    attempts = (
        (run.name, [(a.record["attempt"], a.reason, a.record["start_step"]) for a in run.attempts]) for run in runs
    )
    drawn = draw(figures, list(attempts))
    return (
        f'<h2>Curves <small class="how">{how}</small></h2>\n'
        f"<noscript>The curves need JavaScript.</noscript>\n{names}{drawn}"
    )


def _attempts(run: Run, name: str) -> str:
    title = f"Attempts of {escape(name)}" if name else "Attempts"
    if not run.records:
        return f'<section class="run"><h2>{title}</h2>\n<p class="empty">No attempt has started yet.</p></section>\n'
    attempts = run.attempts
    return (
        f'<section class="run"><h2>{title}</h2>\n{picture(attempts, run.curves.done_at)}{table(attempts)}'
        f"{time_bar(run.time)}</section>\n"
    )


def _starts(run: Run) -> str:
    """A table with a row for each command that submitted or resumed the run."""
    rows = [
        [
            when(line["time"]),
            *map(escape, (line["job_id"], ", ".join(_commits([line])) or "-")),
            f"<code>{_command(line)}</code>",
        ]
        for line in run.submissions
    ]
    titles = _titles("started", "job", "commit", "command")
    return f"<h2>Commands</h2>\n{_table(titles, (('', row) for row in rows))}" if rows else ""


def _titles(*names: str) -> list[str]:
    return [f"<th>{name}</th>" for name in names]


def _table(titles: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], kind: str = "") -> str:
    """An HTML table, which scrolls by itself where it is too wide: the cells of its head, and of each row the first
    cell as it is and the contents of the others."""
    body = "".join(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n" for first, cells in rows)
    head = f"<thead><tr>{''.join(titles)}</tr></thead>"
    return f'<div class="wide {kind}"><table>{head}\n<tbody>{body}</tbody></table></div>\n'


def _command(submission: SubmissionRecord) -> str:
    """What was typed, as HTML."""
    return escape(shlex.join(submission.get("command", [])))


def _commits(submissions: Sequence[SubmissionRecord]) -> list[str]:
    """The commits of the code that was submitted, abbreviated, oldest first."""
    return list(dict.fromkeys(commit[:10] for line in submissions if (commit := line.get("commit"))))


def _label(name: str) -> str:
    """val_accuracy -> validation accuracy; those of another set stay, such as test accuracy"""
    return name.replace("val_", "validation ", 1).replace("train_", "training ", 1).replace("_", " ")


def _number(value: float | None) -> str:
    """None: the value was not finite."""
    return "not finite" if value is None else f"{value:.4g}"


def time_bar(split: TimeSplit) -> str:
    """The bar as HTML; empty for a run that has taken no time."""
    parts, items, x = [], [], 0.0
    for name, share in split.shares.items():
        if not share:
            continue
        taken = f"{name} {share:.1%}, {duration(share * split.total)}"
        parts.append(
            f'<rect class="{CLASS[name]}" x="{100 * x:.3f}%" width="{100 * share:.3f}%" height="{HEIGHT_PX}">'
            f"<title>{taken}</title></rect>"
        )
        items.append(f'<li><svg><rect class="{CLASS[name]}" width="100%" height="100%"/></svg>{taken}</li>')
        x += share
    if not parts:
        return ""
    return (
        f'<h3>Where the time went</h3>\n<div class="lane"><svg role="img" aria-label="where the time went" '
        f'style="height:{HEIGHT_PX}px">{"".join(parts)}</svg></div>\n<ul class="legend">{"".join(items)}</ul>\n'
    )


# -- the attempts over time ------------------------------------------------------------------------------------

Kind = Literal["running", "saving", "lost", "restarting", "queued", "stopped"]
# The kinds of time spans, with their words in the legend.
KINDS: dict[Kind, str] = {
    "running": "running",
    "saving": "saving: from the last step to the end of the attempt",
    "lost": "steps that were lost",
    "restarting": "after a fault, until the ranks started again in the same allocation",
    "queued": "in the queue, to continue by itself",
    "stopped": "stopped, until it was resumed",
}
ORDERLY = ("finished", "preempted", "timeout", "cancelled")
IN_PROGRESS = "in progress"
LABEL_WIDTH = 10.0  # percent of the width, on a wide screen
ROWS, ROW_PX, SIGN_PX, LANE_PX = 4, 20, 16, 28
MINUTE, HOUR, DAY = 60, 3600, 86400
# Seconds between two ticks of the axis.
TICKS = (
    *(1, 2, 5, 10, 15, 30),
    *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 28, 56, 112, 365)),
)


class Span(NamedTuple):
    """A span of time, in Unix seconds."""

    kind: Kind
    start: float
    end: float


@dataclass(frozen=True)
class ShownAttempt:
    """An attempt as the report shows it: always with an end, in Unix seconds."""

    record: AttemptRecord
    end: float
    reason: str  # of the end, or IN_PROGRESS
    end_step: int | None  # None: not recorded
    lost_steps: int | None  # None: not counted

    @classmethod
    def of(cls, record: AttemptRecord, alive: bool, now: float, last_step_at: float | None) -> ShownAttempt:
        """From a record. One without an end is in progress if it is `alive`; else it was killed, and ended with its
        last step: the next attempt will record it as lost, with the steps that its checkpoint does not have."""
        if record["end"] is not None and record["reason"] is not None:
            return cls(record, record["end"], record["reason"], record["end_step"], record["lost_steps"])
        if alive:
            return cls(record, max(record["start"], now), IN_PROGRESS, None, record["lost_steps"])
        return cls(record, max(record["start"], last_step_at or 0.0), "lost", None, None)

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.record["start"]

    @property
    def family(self) -> str:
        """What its end means, as a colour of page.css: all is well, it was stopped in order, or something broke."""
        if self.reason in ("finished", IN_PROGRESS):
            return "good"
        return "orderly" if self.reason in ORDERLY else "fault"

    @property
    def sign(self) -> str:
        """The reference to the symbol of its end on the page."""
        return "#end-" + escape(self.reason.replace(" ", "-"))

    def spans(self, done_at: Mapping[int, float]) -> list[Span]:
        """Its time as spans that are not empty."""
        start, lost_s = self.record["start"], self.record.get("lost_s", 0.0)
        kind: Kind = "running"
        since = self.end
        if lost_s:
            kind, since = "lost", max(start, self.end - lost_s)
        elif self.reason in ORDERLY and self.end_step is not None and self.end_step > self.record["start_step"]:
            kind, since = "saving", min(self.end, max(start, done_at.get(self.end_step, self.end)))
        return [span for span in (Span("running", start, since), Span(kind, since, self.end)) if span.end > span.start]


def spans_of(attempts: Sequence[ShownAttempt], done_at: Mapping[int, float]) -> list[Span]:
    """The spans of time in order; `done_at` has the times of the steps that were saved.

    Only times that the files contain. They do not contain when an attempt saved between its steps, or how long it took
    to start.
    """
    found: list[Span] = []
    for previous, attempt in zip((None, *attempts), attempts):
        record = attempt.record
        if previous and previous.end < record["start"]:
            before = previous.record
            in_place = (before["job_id"], before["restart"]) == (record["job_id"], record["restart"])
            kind: Kind = ("restarting" if in_place else "queued") if before.get("requeue") else "stopped"
            found.append(Span(kind, previous.end, record["start"]))
        found += attempt.spans(done_at)
    return found


def picture(attempts: Sequence[ShownAttempt], done_at: Mapping[int, float]) -> str:
    """An SVG: the lane of time, and above it the end of each attempt."""
    spans = spans_of(attempts, done_at)
    low = attempts[0].record["start"]
    length = max(1.0, max(attempt.end for attempt in attempts) - low)

    def at(moment: float) -> float:
        return 100 * (moment - low) / length  # percent of the width

    rows = _label_rows([at(attempt.end) for attempt in attempts])
    placed = list(zip(attempts, rows or [0] * len(attempts)))
    top = ROW_PX * (1 + max(row for _, row in placed))
    body = [
        f'<rect class="{kind}" x="{at(start):.3f}%" width="{at(end) - at(start):.3f}%" y="{top}" height="{LANE_PX}">'
        f"<title>{KINDS[kind]}, {duration(end - start)}</title></rect>"
        for kind, start, end in spans
    ]
    # All stems first, so that none is drawn across a word. Faults last, so that they are in front of the others.
    placed.sort(key=lambda entry: entry[0].family == "fault")
    body += [_stem(attempt, at(attempt.end), top - ROW_PX * (row + 1), top) for attempt, row in placed]
    body += [_marker(attempt, at(attempt.end), top - ROW_PX * (row + 1), rows is not None) for attempt, row in placed]
    below = top + LANE_PX
    for tick in _ticks(low, length):
        x = f"{at(tick):.2f}%"
        body.append(f'<line class="tick" x1="{x}" x2="{x}" y1="{below}" y2="{below + 5}"/>')
        body.append(f'<text class="x" x="{x}" y="{below}" dy="1.6em">{_clock(tick, length)}</text>')
    used = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    legend = "".join(f'<li><svg><rect class="{k}" width="100%" height="100%"/></svg>{KINDS[k]}</li>' for k in used)
    return (
        f'<div class="lane"><svg role="img" aria-label="attempts over time" style="height:{below + 24}px">'
        f'{"".join(body)}</svg></div>\n<ul class="legend">{legend}</ul>\n'
    )


def table(attempts: Sequence[ShownAttempt]) -> str:
    """An HTML table with a row per attempt."""
    titles = _titles("attempt", "end", "steps", "lost steps", "started", "duration", "job", "ranks", "hosts")
    return _table(titles, (("", _row(attempt)) for attempt in attempts))


def steps(number: int | None) -> str:
    """The text for a number of steps; None means that they have not been counted yet."""
    return "unknown" if number is None else f"{number:,}"


def when(at: float) -> str:
    """A date and a time, in local time, from Unix seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _label_rows(ends: Sequence[float]) -> list[int] | None:
    """The row above the lane for the word of each end (percent of the width): the lowest one where it overlaps no other
    word. None when there are too many ends for words."""
    taken = [0.0] * ROWS  # the right end of the last word in each row
    rows = []
    for x in ends:
        left = x if _word_follows(x) else x - LABEL_WIDTH
        row = next((n for n in range(ROWS) if taken[n] <= left), None)
        if row is None:
            return None
        taken[row] = left + LABEL_WIDTH
        rows.append(row)
    return rows


def _word_follows(x: float) -> bool:
    """Whether the word is right of its sign: near the left edge there is no room on the left."""
    return x < LABEL_WIDTH


def _stem(attempt: ShownAttempt, x: float, y: int, top: int) -> str:
    """A line from the sign of an end, at `y`, down to its time on the lane, whose upper edge is `top`."""
    return (
        f'<g class="{attempt.family}">'
        f'<line class="stem" x1="{x:.2f}%" x2="{x:.2f}%" y1="{y + SIGN_PX / 2:g}" y2="{top + LANE_PX}"/></g>'
    )


def _marker(attempt: ShownAttempt, x: float, y: int, with_word: bool) -> str:
    """How an attempt ended: a sign, and the word for it."""
    reason = escape(attempt.reason)
    place = 'class="after" dx="12"' if _word_follows(x) else 'dx="-12"'
    word = f'<text x="{x:.2f}%" y="{y + SIGN_PX / 2:g}" {place} dy=".35em">{reason}</text>' if with_word else ""
    return (
        f'<g class="mark {attempt.family}"><use href="{attempt.sign}" x="{x:.2f}%" y="{y}" width="{SIGN_PX}" '
        f'height="{SIGN_PX}" transform="translate(-{SIGN_PX / 2:g})"/>{word}'
        f"<title>attempt {attempt.record['attempt']}: {reason}</title></g>"
    )


def _row(attempt: ShownAttempt) -> list[str]:
    record = attempt.record
    job = f"{record['job_id']}{start_of(record)}" + (f" (restart {record['restart']})" if record["restart"] else "")
    first = f"{record['start_step']:,}"
    sign = f'<svg class="sign {attempt.family}"><use href="{attempt.sign}"/></svg>'
    error_lines = (record.get("error") or "").strip().splitlines()
    error = f'<div class="error">{escape(error_lines[-1])}</div>' if error_lines else ""
    return [
        str(record["attempt"]),
        f"{sign}{escape(attempt.reason)}{error}",
        f"from {first}" if attempt.end_step is None else f"{first} to {attempt.end_step:,}",
        steps(attempt.lost_steps),
        when(record["start"]),
        duration(attempt.seconds),
        escape(job),
        str(record["world_size"]),
        escape(", ".join(record["hosts"])),
    ]


def _ticks(low: float, length_s: float) -> list[float]:
    """At most some six round local times from `low` on, in Unix seconds."""
    step = next((s for s in TICKS if length_s / s <= 6), TICKS[-1])
    offset = time.localtime(low).tm_gmtoff
    first, last = math.ceil((low + offset) / step), math.floor((low + length_s + offset) / step)
    return [n * step - offset for n in range(first, last + 1)]


def _clock(at: float, length_s: float) -> str:
    """The label of a time on an axis of this length, in local time."""
    form = "%H:%M:%S" if length_s <= 10 * MINUTE else "%H:%M" if length_s <= DAY else "%b %d %H:%M"
    return time.strftime(form if length_s <= 6 * DAY else "%b %d", time.localtime(at))

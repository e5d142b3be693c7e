"""The attempts of a run over wall-clock time: as a picture, with an axis of round times, and as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

from laststep.records.attempt_record import AttemptRecord, start_of
from laststep.records.progress import duration

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
    titles = ("attempt", "end", "steps", "lost steps", "started", "duration", "job", "ranks", "hosts")
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = "".join(f"<tr>{_row(attempt)}</tr>\n" for attempt in attempts)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n'


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


def _row(attempt: ShownAttempt) -> str:
    record = attempt.record
    job = f"{record['job_id']}{start_of(record)}" + (f" (restart {record['restart']})" if record["restart"] else "")
    first = f"{record['start_step']:,}"
    sign = f'<svg class="sign {attempt.family}"><use href="{attempt.sign}"/></svg>'
    error_lines = (record.get("error") or "").strip().splitlines()
    error = f'<div class="error">{escape(error_lines[-1])}</div>' if error_lines else ""
    cells = [
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
    return "".join(f"<td>{cell}</td>" for cell in cells)


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

"""The attempts of a run over wall-clock time: as a picture, with an axis of round times, and as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from laststep.observe.progress import duration
from laststep.records.attempt_record import AttemptRecord, start_of

Kind = Literal["running", "saving", "lost", "restarting", "queued", "stopped"]
Family = Literal["good", "orderly", "fault"]  # the colours of page.css
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


@dataclass(frozen=True)
class Span:
    """A span of time, in Unix seconds."""

    kind: Kind
    start: float
    end: float


@dataclass(frozen=True)
class ShownAttempt:
    """An attempt as the report shows it: always with an end. Times are Unix seconds."""

    number: int
    job_id: str
    restart: int  # how often Slurm had requeued the job
    step: str  # which start of the ranks within the allocation, see `start_of`
    ranks: int
    hosts: Sequence[str]
    start: float
    end: float
    start_step: int
    end_step: int | None  # None: not recorded
    reason: str  # of the end, or IN_PROGRESS
    lost_steps: int | None  # None: not counted
    lost_s: float  # seconds that these steps took
    requeue: bool  # whether Slurm is to start the job again
    error: str

    @classmethod
    def of(cls, record: AttemptRecord, alive: bool, now: float, last_step_at: float | None) -> ShownAttempt:
        """From a record. One without an end has ended `now` if it is `alive`, else with its last step."""
        end = record["end"]
        reason: str | None = record["reason"]
        end_step: int | None = record["end_step"]
        lost_steps: int | None = record["lost_steps"]
        if end is None or reason is None:
            end_step = None
            if alive:
                end, reason = max(record["start"], now), IN_PROGRESS
            else:
                # The next attempt will record it as lost, with the steps that its checkpoint does not have.
                end, reason, lost_steps = max(record["start"], last_step_at or 0.0), "lost", None
        return cls(
            number=record["attempt"],
            job_id=str(record["job_id"]),
            restart=record["restart"],
            step=start_of(record),
            ranks=record["world_size"],
            hosts=record["hosts"],
            start=record["start"],
            end=end,
            start_step=record["start_step"],
            end_step=end_step,
            reason=str(reason),
            lost_steps=lost_steps,
            lost_s=record.get("lost_s", 0.0),
            requeue=record.get("requeue", False),
            error=record.get("error") or "",
        )

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start

    @property
    def family(self) -> Family:
        """What its end means for the run: it is well, it was stopped in an orderly way, or something broke."""
        if self.reason in ("finished", IN_PROGRESS):
            return "good"
        return "orderly" if self.reason in ORDERLY else "fault"

    @property
    def sign(self) -> str:
        """The reference to the symbol of its end on the page."""
        return "#end-" + escape(self.reason.replace(" ", "-"))

    def spans(self, done_at: Mapping[int, float]) -> list[Span]:
        """Its time as spans that are not empty."""
        kind: Kind = "running"
        since = self.end
        if self.lost_s:
            kind, since = "lost", max(self.start, self.end - self.lost_s)
        elif self.reason in ORDERLY and self.end_step is not None and self.end_step > self.start_step:
            kind, since = "saving", min(self.end, max(self.start, done_at.get(self.end_step, self.end)))
        spans = [Span("running", self.start, since), Span(kind, since, self.end)]
        return [span for span in spans if span.end > span.start]


@dataclass(frozen=True)
class Timeline:
    """The attempts of a run, in order."""

    attempts: Sequence[ShownAttempt]

    @classmethod
    def of(cls, records: Sequence[AttemptRecord], alive: bool, now: float, last_step_at: float | None) -> Timeline:
        """From the records; `alive` says whether an attempt without an end is in progress or was killed."""
        return cls([ShownAttempt.of(record, alive, now, last_step_at) for record in records])

    def spans(self, done_at: Mapping[int, float]) -> list[Span]:
        """The spans of time in order; `done_at` has the times of the steps that were saved.

        Only times that the files contain. They do not contain when an attempt saved between its steps, or how long it
        took to start.
        """
        found: list[Span] = []
        previous: ShownAttempt | None = None
        for attempt in self.attempts:
            if previous and previous.end < attempt.start:
                in_place = (previous.job_id, previous.restart) == (attempt.job_id, attempt.restart)
                kind: Kind = ("restarting" if in_place else "queued") if previous.requeue else "stopped"
                found.append(Span(kind, previous.end, attempt.start))
            found += attempt.spans(done_at)
            previous = attempt
        return found

    def picture(self, done_at: Mapping[int, float]) -> str:
        """An SVG: the lane of time, and above it the end of each attempt."""
        spans = self.spans(done_at)
        axis = TimeAxis.between(self.attempts[0].start, max(attempt.end for attempt in self.attempts))
        length = axis.high - axis.low
        rows = self._label_rows(axis)
        placed = list(zip(self.attempts, rows or [0] * len(self.attempts)))
        top = ROW_PX * (1 + max(row for _, row in placed))
        body = []
        for span in spans:
            x, width = axis.at(span.start), axis.at(span.end) - axis.at(span.start)
            title = f"{KINDS[span.kind]}, {duration(span.end - span.start)}"
            body.append(
                f'<rect class="{span.kind}" x="{x:.3f}%" width="{width:.3f}%" y="{top}" height="{LANE_PX}">'
                f"<title>{title}</title></rect>"
            )
        # All stems first, so that none is drawn across a word. Faults last, so that they are in front of the others.
        placed.sort(key=lambda entry: entry[0].family == "fault")
        body += [_stem(axis, attempt, top - ROW_PX * (row + 1), top) for attempt, row in placed]
        body += [_marker(axis, attempt, top - ROW_PX * (row + 1), rows is not None) for attempt, row in placed]
        below = top + LANE_PX
        for tick in axis.ticks:
            at = f"{axis.at(tick):.2f}%"
            body.append(f'<line class="tick" x1="{at}" x2="{at}" y1="{below}" y2="{below + 5}"/>')
            body.append(f'<text class="x" x="{at}" y="{below}" dy="1.6em">{clock(tick, length)}</text>')
        used = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
        legend = "".join(f'<li><svg><rect class="{k}" width="100%" height="100%"/></svg>{KINDS[k]}</li>' for k in used)
        return (
            f'<div class="lane"><svg role="img" aria-label="attempts over time" style="height:{below + 24}px">'
            f'{"".join(body)}</svg></div>\n<ul class="legend">{legend}</ul>\n'
        )

    def table(self) -> str:
        """An HTML table with a row per attempt."""
        titles = ("attempt", "end", "steps", "lost steps", "started", "duration", "job", "ranks", "hosts")
        head = "".join(f"<th>{title}</th>" for title in titles)
        rows = "".join(f"<tr>{_row(attempt)}</tr>\n" for attempt in self.attempts)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n'

    def _label_rows(self, axis: TimeAxis) -> list[int] | None:
        """The row above the lane for the word of each attempt's end: the lowest one where it overlaps no other word.
        None when there are too many ends for words."""
        taken = [0.0] * ROWS  # the right end of the last word in each row
        rows = []
        for attempt in self.attempts:
            x = axis.at(attempt.end)
            left = x if _word_follows(x) else x - LABEL_WIDTH
            row = next((n for n in range(ROWS) if taken[n] <= left), None)
            if row is None:
                return None
            taken[row] = left + LABEL_WIDTH
            rows.append(row)
        return rows


def steps(number: int | None) -> str:
    """The text for a number of steps; None means that they have not been counted yet."""
    return "unknown" if number is None else f"{number:,}"


def when(at: float) -> str:
    """A date and a time, in local time, from Unix seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _stem(axis: TimeAxis, attempt: ShownAttempt, y: int, top: int) -> str:
    """A line from the sign of an end, at `y`, down to its time on the lane, whose upper edge is `top`."""
    x = f"{axis.at(attempt.end):.2f}%"
    return (
        f'<g class="{attempt.family}">'
        f'<line class="stem" x1="{x}" x2="{x}" y1="{y + SIGN_PX / 2:g}" y2="{top + LANE_PX}"/></g>'
    )


def _marker(axis: TimeAxis, attempt: ShownAttempt, y: int, with_word: bool) -> str:
    """How an attempt ended: a sign, and the word for it."""
    x, reason = axis.at(attempt.end), escape(attempt.reason)
    place = 'class="after" dx="12"' if _word_follows(x) else 'dx="-12"'
    word = f'<text x="{x:.2f}%" y="{y + SIGN_PX / 2:g}" {place} dy=".35em">{reason}</text>' if with_word else ""
    return (
        f'<g class="mark {attempt.family}"><use href="{attempt.sign}" x="{x:.2f}%" y="{y}" width="{SIGN_PX}" '
        f'height="{SIGN_PX}" transform="translate(-{SIGN_PX / 2:g})"/>{word}'
        f"<title>attempt {attempt.number}: {reason}</title></g>"
    )


def _word_follows(x: float) -> bool:
    """Whether the word is right of its sign: near the left edge there is no room on the left."""
    return x < LABEL_WIDTH


def _row(attempt: ShownAttempt) -> str:
    job = f"{attempt.job_id}{attempt.step}" + (f" (restart {attempt.restart})" if attempt.restart else "")
    first = f"{attempt.start_step:,}"
    sign = f'<svg class="sign {attempt.family}"><use href="{attempt.sign}"/></svg>'
    error_lines = attempt.error.strip().splitlines()
    error = f'<div class="error">{escape(error_lines[-1])}</div>' if error_lines else ""
    cells = [
        str(attempt.number),
        f"{sign}{escape(attempt.reason)}{error}",
        f"from {first}" if attempt.end_step is None else f"{first} to {attempt.end_step:,}",
        steps(attempt.lost_steps),
        when(attempt.start),
        duration(attempt.seconds),
        escape(job),
        str(attempt.ranks),
        escape(", ".join(attempt.hosts)),
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)


MINUTE, HOUR, DAY = 60, 3600, 86400
TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 28, 56, 112, 365)),
)


@dataclass(frozen=True)
class TimeAxis:
    """From `low` to `high`, in Unix seconds."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The position of a time, in percent of the axis."""
        return 100 * (value - self.low) / (self.high - self.low)

    @classmethod
    def between(cls, start: float, end: float) -> TimeAxis:
        """With ticks at round local times."""
        end = max(end, start + 1)
        step = next((s for s in TIME_STEPS if (end - start) / s <= 6), TIME_STEPS[-1])
        offset = time.localtime(start).tm_gmtoff
        first, last = math.ceil((start + offset) / step), math.floor((end + offset) / step)
        return cls(start, end, tuple(n * step - offset for n in range(first, last + 1)))


def clock(at: float, length_s: float) -> str:
    """The label of a time on an axis of this length, in local time."""
    form = "%H:%M:%S" if length_s <= 10 * MINUTE else "%H:%M" if length_s <= DAY else "%b %d %H:%M"
    return time.strftime(form if length_s <= 6 * DAY else "%b %d", time.localtime(at))

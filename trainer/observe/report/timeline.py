"""The attempts of a run over wall-clock time: as a picture, and as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trainer.observe.progress import duration
from trainer.observe.report.scale import Axis, clock
from trainer.records.attempt_record import AttemptRecord, OpenAttempt

# What a stretch of time was: the words of the legend.
KINDS = {
    "running": "running",
    "saving": "saving: from the last step to the end",
    "lost": "steps that were lost",
    "queued": "queued, to go on by itself",
    "stopped": "stopped, until it was resumed",
}
# An EndedAttempt, or an OpenAttempt to which `_open_end` gives an end that no file has.
ShownAttempt = Mapping[str, Any]
ORDERLY = ("finished", "preempted", "timeout", "cancelled")
UNDER_WAY = "under way"
LABEL_WIDTH = 10.0  # percent of the width, on a wide screen
ROWS, ROW_PX, SIGN_PX, LANE_PX = 4, 20, 16, 28


@dataclass(frozen=True)
class Span:
    """A stretch of time, in Unix seconds; `kind` is one of KINDS."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Attempts:
    """The attempts of a run, each with an end: `now`, or the last sign of life, of one that has none."""

    records: Sequence[ShownAttempt]

    @classmethod
    def of(cls, records: Sequence[AttemptRecord], alive: bool, now: float, last_sign: float | None) -> Attempts:
        """`alive` tells an attempt under way from one that left no word."""
        return cls([record if record["reason"] else _open_end(record, alive, now, last_sign) for record in records])

    def spans(self, done_at: Mapping[int, float]) -> list[Span]:
        """What was when; `done_at` has the times of the steps that were kept. Only what the files tell: nothing says
        when an attempt saved in the midst of its steps, or how long it took to start."""
        found: list[Span] = []
        before: ShownAttempt | None = None
        for record in self.records:
            if before and before["end"] < record["start"]:
                found.append(Span("queued" if before.get("requeue") else "stopped", before["end"], record["start"]))
            found += _of_attempt(record, done_at)
            before = record
        return found

    def picture(self, done_at: Mapping[int, float]) -> str:
        """The lane of time, and over it how each attempt ended."""
        spans = self.spans(done_at)
        axis = Axis.of_time(self.records[0]["start"], max(record["end"] for record in self.records))
        length = axis.high - axis.low
        rows = self._rows(axis)
        ends = list(zip(self.records, rows or [0] * len(self.records)))
        top = ROW_PX * (1 + max(row for _, row in ends))
        body = []
        for span in spans:
            x, width = axis.at(span.start), axis.at(span.end) - axis.at(span.start)
            said = f"{KINDS[span.kind]}, {duration(span.end - span.start)}"
            body.append(
                f'<rect class="{span.kind}" x="{x:.3f}%" width="{width:.3f}%" y="{top}" height="{LANE_PX}">'
                f"<title>{said}</title></rect>"
            )
        # All stems first, so that none is drawn across a word; and faults last, in front of what went well.
        ends.sort(key=lambda end: _family(end[0]) == "fault")
        body += [_stem(axis, record, top - ROW_PX * (row + 1), top) for record, row in ends]
        body += [_marker(axis, record, top - ROW_PX * (row + 1), rows is not None) for record, row in ends]
        below = top + LANE_PX
        for tick in axis.ticks:
            at = f"{axis.at(tick):.2f}%"
            body.append(f'<line class="tick" x1="{at}" x2="{at}" y1="{below}" y2="{below + 5}"/>')
            body.append(f'<text class="x" x="{at}" y="{below}" dy="1.6em">{clock(tick, length)}</text>')
        known = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
        legend = "".join(f'<li><svg><rect class="{k}" width="100%" height="100%"/></svg>{KINDS[k]}</li>' for k in known)
        return (
            f'<div class="lane"><svg role="img" aria-label="attempts over time" style="height:{below + 24}px">'
            f'{"".join(body)}</svg></div>\n<ul class="legend">{legend}</ul>\n'
        )

    def table(self) -> str:
        """A line per attempt."""
        titles = ("attempt", "ended", "steps", "lost steps", "began", "lasted", "job", "hosts")
        head = "".join(f"<th>{title}</th>" for title in titles)
        rows = "".join(f"<tr>{_row(record)}</tr>\n" for record in self.records)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n'

    def _rows(self, axis: Axis) -> list[int] | None:
        """The row above the lane for each attempt's end, the lowest where its word runs into no other; None when there
        are too many ends for words."""
        taken = [0.0] * ROWS  # up to here
        rows = []
        for record in self.records:
            x = axis.at(record["end"])
            left = x if _word_follows(x) else x - LABEL_WIDTH
            row = next((n for n in range(ROWS) if taken[n] <= left), None)
            if row is None:
                return None
            taken[row] = left + LABEL_WIDTH
            rows.append(row)
        return rows


def steps(number: int | None) -> str:
    """A number of steps; None when nobody has counted them yet."""
    return "not known" if number is None else f"{number:,}"


def _open_end(record: OpenAttempt, alive: bool, now: float, last_sign: float | None) -> ShownAttempt:
    if alive:
        return record | {"end": max(record["start"], now), "end_step": None, "reason": UNDER_WAY}
    # The next attempt will enter it as lost, with the steps that its checkpoint does not have.
    end = max(record["start"], last_sign or 0.0)
    return record | {"end": end, "end_step": None, "lost_steps": None, "reason": "lost"}


def _of_attempt(record: ShownAttempt, done_at: Mapping[int, float]) -> list[Span]:
    start, end = record["start"], record["end"]
    tail, since = "running", end
    if record.get("lost_s"):
        tail, since = "lost", max(start, end - record["lost_s"])
    elif record["reason"] in ORDERLY and record["end_step"] > record["start_step"]:
        tail, since = "saving", min(end, max(start, done_at.get(record["end_step"], end)))
    spans = [Span("running", start, since), Span(tail, since, end)]
    return [span for span in spans if span.end > span.start]


def _stem(axis: Axis, record: ShownAttempt, y: int, top: int) -> str:
    """A line from the sign of an end, at `y`, down to its moment on the lane, whose upper edge is `top`."""
    x = f"{axis.at(record['end']):.2f}%"
    return (
        f'<g class="{_family(record)}">'
        f'<line class="stem" x1="{x}" x2="{x}" y1="{y + SIGN_PX / 2:g}" y2="{top + LANE_PX}"/></g>'
    )


def _marker(axis: Axis, record: ShownAttempt, y: int, worded: bool) -> str:
    """How an attempt ended: a sign, and the word for it."""
    at, reason = axis.at(record["end"]), escape(record["reason"])
    place = 'class="after" dx="12"' if _word_follows(at) else 'dx="-12"'
    word = f'<text x="{at:.2f}%" y="{y + SIGN_PX / 2:g}" {place} dy=".35em">{reason}</text>' if worded else ""
    return (
        f'<g class="mark {_family(record)}"><use href="{_sign(record)}" x="{at:.2f}%" y="{y}" width="{SIGN_PX}" '
        f'height="{SIGN_PX}" transform="translate(-{SIGN_PX / 2:g})"/>{word}'
        f"<title>attempt {record['attempt']}: {reason}</title></g>"
    )


def _word_follows(x: float) -> bool:
    """Whether the word stands after its sign: at the left edge there is no room before it, at the right none after."""
    return x < LABEL_WIDTH


def _row(record: ShownAttempt) -> str:
    job = f"{record['job_id']} (restart {record['restart']})" if record["restart"] else str(record["job_id"])
    until = "on" if record["end_step"] is None else f"to {record['end_step']:,}"
    reason = escape(record["reason"])
    sign = f'<svg class="sign {_family(record)}"><use href="{_sign(record)}"/></svg>'
    why = (record.get("error") or "").strip().splitlines()
    error = f'<div class="error">{escape(why[-1])}</div>' if why else ""
    cells = [
        str(record["attempt"]),
        f"{sign}{reason}{error}",
        f"{record['start_step']:,} {until}",
        steps(record["lost_steps"]),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["start"])),
        duration(record["end"] - record["start"]),
        escape(job),
        escape(", ".join(record["hosts"])),
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _sign(record: ShownAttempt) -> str:
    return "#end-" + escape(record["reason"].replace(" ", "-"))


def _family(record: ShownAttempt) -> str:
    """What an end means for its reader: done, goes on, or something broke."""
    if record["reason"] in ("finished", UNDER_WAY):
        return "good"
    return "orderly" if record["reason"] in ORDERLY else "fault"

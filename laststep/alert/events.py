"""The events of a run, as its folder shows them. Asked again, the same folder gives the same events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from laststep.config.schema import Launch
from laststep.ranks.slurm import is_job_id
from laststep.records.attempt_record import AttemptRecord, EndedAttempt, in_one_line
from laststep.records.metrics import StepLine
from laststep.records.plan import read_plan
from laststep.records.progress import duration
from laststep.records.retry import FAILURES, Next, recorded
from laststep.rundir import RunDir
from laststep.say import command, counted

# The loss has diverged when it was above its range for STEPS in a row: the range of the WINDOW steps before.
STEPS, WINDOW, LEAST = 20, 200, 50
SPREADS, SHARE = 8.0, 0.1  # above the median by this many spreads, and by this share of it


@dataclass(frozen=True)
class Event:
    """Something to say, once."""

    kind: str  # see laststep.alert.KINDS
    key: str  # names the event among those of the run
    title: str
    text: str


def of_attempts(
    run: RunDir, records: Sequence[AttemptRecord], launch: Launch, when: Sequence[str], since: float = 0.0
) -> Iterator[Event]:
    """The events of attempts that have ended `since` then, of the kinds in `when`: at most one each."""
    ended: list[EndedAttempt] = []
    for record in records:
        if not record["reason"]:
            continue
        ended.append(record)
        kinds = _kinds(ended, launch)
        if record["end"] >= since and (kind := next((kind for kind in kinds if kind in when), None)):
            yield _of_end(run, kind, ended)


def _kinds(ended: Sequence[EndedAttempt], launch: Launch) -> list[str]:
    """What the end of the last attempt is, the most telling first."""
    last = ended[-1]
    if last["reason"] == "finished":
        return ["finished"]
    at_hand = not is_job_id(last["job_id"]) and not last["end_step"]  # on a terminal, where the error is printed
    if last["reason"] == "cancelled" or at_hand:  # the user did that, and knows
        return []
    hung = ["hung"] if last["reason"] == "hung" else []
    if not _continues(last):
        return ["failed", *hung]
    in_queue = last["reason"] not in FAILURES or recorded(ended, launch).what is Next.REQUEUE
    return [*hung, *(["requeued"] if in_queue else [])]


def _continues(record: EndedAttempt) -> bool:
    """Whether the run continues by itself. Where there is no queue, nobody starts it again after a signal."""
    return record["requeue"] and (record["reason"] in FAILURES or is_job_id(record["job_id"]))


def _of_end(run: RunDir, kind: str, ended: Sequence[EndedAttempt]) -> Event:
    last = ended[-1]
    plan = read_plan(run.plan)
    of = f" of {plan['total_steps']:,}" if plan else ""
    what = {
        "finished": f"finished after {last['end_step']:,} steps",
        "failed": f"{last['reason']} at step {last['end_step']:,}{of}, and does not continue by itself",
        "hung": f"hung at step {last['end_step']:,}{of}",
        "requeued": f"{last['reason']} at step {last['end_step']:,}{of}; it continues from the queue",
    }[kind]
    lines = [f"{run.name} {what}.", f"Attempt {last['attempt']}, job {last['job_id']}, {_hosts(last)}."]
    if last["error"] and kind != "finished":
        lines.append(f"Why: {in_one_line(last['error'])}")
    lines.append(f"Cost: {_cost(ended)}")
    follows = {
        "finished": f"report {run.typed}",
        "failed": f"resume {run.typed}",
        "hung": f"logs {run.typed}",
        "requeued": f"status {run.typed}",
    }[kind]
    if kind == "hung":
        lines.append("It continues by itself." if _continues(last) else f"Continue: {command(f'resume {run.typed}')}")
    lines.append(f"Next: {command(follows)}")
    return Event(kind, f"{last['attempt']:04}-end", f"{run.name} {_title(kind)}", "\n".join(lines))


def _title(kind: str) -> str:
    return {"requeued": "is requeued", "idle": "leaves its GPUs idle", "diverged": "diverges"}.get(kind, kind)


def _hosts(record: AttemptRecord) -> str:
    hosts = record["hosts"]
    named = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
    return f"{counted(record['world_size'], 'rank')} on {named or 'an unknown host'}"


def _cost(ended: Sequence[EndedAttempt]) -> str:
    last, all_lost = ended[-1], sum(record["lost_steps"] for record in ended)
    rank_hours = sum((record["end"] - record["start"]) * record["world_size"] for record in ended) / 3600
    lost = f"{counted(last['lost_steps'], 'step')} lost" if last["lost_steps"] else "no step lost"
    if last["lost_s"]:
        lost += f", {duration(last['lost_s'])} of {counted(last['world_size'], 'rank')}"
    return f"{lost}; since the start {counted(all_lost, 'lost step')} and {rank_hours:,.2f} rank hours"


def of_idle(run: RunDir, idle: Any, attempt: int) -> Event:
    """GPUs that do nothing, see laststep.telemetry.readings.Idle: once per attempt."""
    lines = [
        f"All GPUs of {idle.node} have been idle for {duration(idle.seconds)}, at step {idle.step or 0:,}.",
        f"Likely, {idle.cause}.",
        "Cost: an allocation that does nothing; many sites cancel such jobs.",
        f"Next: {command(f'logs {run.typed}')}",
    ]
    return Event("idle", f"{attempt:04}-idle", f"{run.name} {_title('idle')}", f"{run.name}: " + "\n".join(lines))


class Loss:
    """Follows the loss, step by step, and says where it leaves its own recent range.

    The range is the median of the steps before, and SPREADS times how far their upper half is from it (the median of
    that), but at least SHARE of it. Steps outside do not move it. A value that is not finite is outside. Once the loss
    has stayed outside for STEPS, that is said, and its new range counts: a jump is said once.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._outside: list[tuple[int, float | None]] = []
        self._limit: float | None = None

    def add(self, step: int, loss: float | None) -> tuple[int, float | None, float] | None:
        """A further step. Returns the first step outside, the loss there, and the usual loss, where it is said."""
        if len(self._recent) < LEAST:
            self._take(loss)
            return None
        usual = median(self._recent)
        if self._limit is None:
            above = [value - usual for value in self._recent if value >= usual]
            self._limit = usual + max(SPREADS * median(above), SHARE * abs(usual), 1e-12)
        if loss is not None and math.isfinite(loss) and loss <= self._limit:
            self._outside.clear()
            self._take(loss)
            return None
        self._outside.append((step, loss))
        if len(self._outside) < STEPS:
            return None
        first, value = self._outside[0]
        outside, self._outside = self._outside, []
        self._recent.clear()
        for _, later in outside:
            self._take(later)
        return first, value, usual

    def _take(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self._recent.append(loss)
            self._limit = None


def of_loss(run: RunDir, lines: Iterator[StepLine], loss: Loss) -> Iterator[Event]:
    """The events that further lines of metrics.jsonl bring. A loop that logs no loss has none."""
    for line in lines:
        if "loss" in line and (found := loss.add(line["step"], line["loss"])):
            first, value, usual = found
            is_now = "not finite" if value is None else f"{value:.4g}"
            text = [
                f"{run.name}: the loss has been above its range since step {first:,}: {is_now}, usually {usual:.4g}.",
                f"Cost: {STEPS} steps and more, if it does not come back.",
                f"Next: {command(f'report {run.typed}')} shows the curve,",
                f"{command(f'cancel {run.typed}')} stops the run.",
            ]
            yield Event("diverged", f"loss-{first:09}", f"{run.name} {_title('diverged')}", "\n".join(text))

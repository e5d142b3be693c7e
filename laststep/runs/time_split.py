"""Where a run's time went: training, saves, lost steps, restarts, the queue. From what every run records.

Every second between the first submission and the run's end (or now) belongs to exactly one part, except while nobody
wanted the run to continue: from the end of an attempt that was not continued until the next submission.

    queue       from the submission, or from the end of an attempt whose job was requeued, to the start of the job.
                Where that start is not recorded (Slurm before 23.02, older versions of Laststep): to the start of the
                attempt
    restarts    from the start of the job to an attempt's first step; from an attempt's last step to its end, if it
                ended by fault; and from there to the next attempt in the same allocation
    lost steps  steps that were done, but not kept
    saves       the training loop stood still for a save. The attempt under way has not recorded that yet, and a lost
                one could not. Attempts of older versions have only the last save of a stop
    training    everything else: steps that were kept, validation, waiting for data

Times are those of the clock on the wall, whatever the number of ranks was.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from laststep.ranks.slurm import is_job_id
from laststep.records.attempt_record import AttemptRecord
from laststep.records.metrics import newest_step, steps_from
from laststep.records.retry import FAILURES
from laststep.records.submissions import SubmissionRecord

STOPS = ("preempted", "timeout", "cancelled")  # these end with a save
LEAST_SHARE = 0.0005  # smaller shares would be printed as 0.0%


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a run's time, by what they were spent on."""

    training: float = 0.0
    queue: float = 0.0
    restarts: float = 0.0
    lost_steps: float = 0.0
    saves: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())

    @property
    def shares(self) -> dict[str, float]:
        """The part of the total, by name, largest first after training."""
        total = self.total
        parts = {name.replace("_", " "): seconds / total for name, seconds in vars(self).items()} if total else {}
        return dict(sorted(parts.items(), key=lambda part: (part[0] != "training", -part[1])))

    def __add__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __str__(self) -> str:
        shown = {name: share for name, share in self.shares.items() if name == "training" or share >= LEAST_SHARE}
        return ", ".join(f"{name} {share:.1%}" for name, share in shown.items())


@dataclass(frozen=True)
class Waiting:
    """The run waits for its next attempt now."""

    job_id: str
    in_place: bool  # in the allocation that it has, not in the queue


def split_time(
    records: Sequence[AttemptRecord],
    submissions: Sequence[SubmissionRecord],
    metrics: Path,
    now: float,
    alive: bool = False,
    waiting: Waiting | None = None,
) -> TimeSplit:
    """Split the time of a run. `alive`: an attempt without an end is under way; otherwise it ended with its last step.
    Times are Unix seconds."""
    split, previous, ended_at = TimeSplit(), None, 0.0
    for record in records:
        job, start = record["job_id"], record["start"]
        in_place = previous is not None and (previous["job_id"], previous["restart"]) == (job, record["restart"])
        since = _waits_since(job, previous, ended_at, start, submissions)
        split += _wait(job, since, start, in_place, record["job_start"])
        ended_at = max(start, record["end"] or _end_of_open(record, metrics, now, alive))
        split += _of_attempt(record, ended_at, metrics)
        previous = record
    if waiting is not None:
        since = _waits_since(waiting.job_id, previous, ended_at, now, submissions)
        split += _wait(waiting.job_id, since, now, waiting.in_place, None)
    return split


def _waits_since(
    job_id: str,
    previous: AttemptRecord | None,
    ended_at: float,
    until: float,
    submissions: Sequence[SubmissionRecord],
) -> float:
    """When the wait for an attempt of this job began; before that the run was stopped."""
    submitted = min((line["time"] for line in submissions if line["job_id"] == job_id), default=None)
    if previous is not None and (previous["job_id"] == job_id or (submitted is None and previous["requeue"])):
        since = ended_at
    else:
        since = until if submitted is None else submitted
    return min(max(since, ended_at), until)


def _wait(job_id: str, since: float, until: float, in_place: bool, job_start: float | None) -> TimeSplit:
    """The wait for an attempt, which began at `until`."""
    if in_place or not is_job_id(job_id):  # only Slurm has a queue
        return TimeSplit(restarts=until - since)
    started = until if job_start is None else min(max(job_start, since), until)
    return TimeSplit(queue=started - since, restarts=until - started)


def _end_of_open(record: AttemptRecord, metrics: Path, now: float, alive: bool) -> float:
    last = newest_step(metrics)
    return now if alive else last["time"] if last else record["start"]


def _of_attempt(record: AttemptRecord, end: float, metrics: Path) -> TimeSplit:
    """The time of one attempt, until its `end`."""
    span, step_s = end - record["start"], record["step_s"]
    kept_step = record["end_step"] - record["lost_steps"] if record["reason"] else _newest(metrics, record["start"])
    if kept_step <= record["start_step"]:  # no step was kept, and lost_s may include the start
        lost_s = min(span, record["lost_s"] if step_s is None else record["lost_steps"] * step_s)
        return TimeSplit(restarts=span - lost_s, lost_steps=lost_s)
    trained = _trained(record, kept_step, end, metrics)
    if trained is None:  # metrics.jsonl is gone or damaged: what the record alone says
        lost_s = min(span, record["lost_s"])
        kept_s = span if step_s is None else (kept_step - record["start_step"]) * step_s
        training = min(span - lost_s, kept_s)
        return TimeSplit(training, restarts=span - lost_s - training, lost_steps=lost_s)
    begun, ended = trained
    lost_s = min(record["lost_s"], end - ended)
    after_s = end - ended - lost_s
    by_fault = record["reason"] in FAILURES
    rest = ended - begun if by_fault else end - begun - lost_s
    saves = record["save_s"]
    if saves is None:
        saves = after_s if record["reason"] in STOPS else 0.0
    saves = min(saves, rest)
    restarts = begun - record["start"] + after_s * by_fault
    return TimeSplit(rest - saves, restarts=restarts, lost_steps=lost_s, saves=saves)


def _newest(metrics: Path, start: float) -> int:
    """The last step done since then; 0 when there is none."""
    newest = newest_step(metrics)
    return newest["step"] if newest and newest["time"] >= start else 0


def _trained(record: AttemptRecord, kept_step: int, end: float, metrics: Path) -> tuple[float, float] | None:
    """When the attempt's first step began, and when the last one that was kept ended; None if metrics.jsonl does not
    say."""
    lines = steps_from(metrics, record["start_step"] + 1)
    first, last = next(lines, None), next(steps_from(metrics, kept_step), None)
    if first is None or last is None or not record["start"] <= first["time"] <= last["time"] <= end:
        return None
    # The lines of train.log_every steps are written together, and have the same time.
    together = 1 + sum(1 for _ in itertools.takewhile(lambda line: line["time"] == first["time"], lines))
    later = last["step"] - record["start_step"] - together
    step_s = record["step_s"] or ((last["time"] - first["time"]) / later if later > 0 else 0.0)
    return max(record["start"], first["time"] - together * step_s), last["time"]

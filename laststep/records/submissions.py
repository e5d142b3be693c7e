"""submissions.jsonl: each time that a run was submitted or started, one JSON object per line.

sbatch may be accepted without its answer arriving: it timed out, or the command that waited for it was killed. So the
command first writes an intent, a line with the tag of the job but without its id. Three kinds of line close it, all
with the same tag: a submission, once the id is known; one that says that Slurm has refused the job; one that says that
the command has withdrawn, because another one was first. An open intent means that the run may have a job in the queue.
After `UNCLEAR_S` a job that Slurm does not show will not come any more: the intent has expired.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from laststep.records.metrics import read_lines

# Slurm's own time-outs are shorter (MessageTimeout, at most 100 s): whatever sbatch has sent was handled or dropped.
UNCLEAR_S = 120.0
Closed = Literal["refused", "withdrawn", "expired"]


class Submission(TypedDict, total=False):
    """What a command knows about a submission before the job has an id."""

    time: float  # Unix seconds
    host: str
    process: str  # of the command, see laststep.ranks.process.here; for --local this is the launcher
    command: list[str]  # sys.argv
    folder: str  # the ranks' working folder: where the first command of the run was typed
    commit: str | None  # of the user's repository, or of Laststep's clone; ranks that another launcher starts lack it
    code: str  # "new": the job runs a copy that this command made; "same": one of an earlier submission
    version: str  # Laststep's
    job_name: str  # Slurm's name for the job
    tag: str  # in the comment of a job that Laststep submitted: its id may be given to another job one day
    chain: str  # the tag of the first job of its chain, see launch.chain
    array_index: int  # of the run's job in the array of a sweep
    config: str  # the run's config.yaml as it was then; records of older versions lack it


class _Required(TypedDict):
    job_id: str
    time: float  # Unix seconds


class SubmissionRecord(_Required, Submission, total=False):  # type: ignore[misc]
    """One submission: the job, and where and how it was started."""


def read_submissions(path: Path) -> list[SubmissionRecord]:
    """The submissions in a file, oldest first. A damaged line is skipped; a file that does not exist has none."""
    return submissions_in(read_lines(path))


def submissions_in(lines: Iterable[Mapping[str, Any]]) -> list[SubmissionRecord]:
    """The submissions among the lines of the file. A job that the command and the job itself have recorded counts
    once."""
    found: dict[tuple[object, object], Mapping[str, Any]] = {}
    for number, line in enumerate(lines):
        if _Required.__required_keys__ <= line.keys():
            found.setdefault((line["job_id"], line.get("tag", number)), line)
    return [cast("SubmissionRecord", line) for line in found.values()]


def open_intents(path: Path) -> list[Submission]:
    """The submissions in a file of which nobody knows yet whether Slurm has the job, oldest first."""
    return intents_in(read_lines(path))


def intents_in(lines: Iterable[Mapping[str, Any]]) -> list[Submission]:
    """The open intents among the lines of the file."""
    found: dict[str, Submission] = {}
    for line in lines:
        tag = line.get("tag")
        if not isinstance(tag, str):
            continue
        if "job_id" in line or "closed" in line:
            found.pop(tag, None)
        elif "time" in line:
            found[tag] = cast("Submission", line)
    return list(found.values())


def is_unclear(intent: Submission) -> bool:
    """Whether the job of an open intent may still come into the queue. The clocks of two hosts may differ."""
    return abs(time.time() - intent["time"]) < UNCLEAR_S

"""submissions.jsonl: each time that a run was submitted or started, one JSON object per line."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, cast

from trainer.records.metrics import read_lines


class _Required(TypedDict):
    job_id: str
    time: float  # Unix seconds


class SubmissionRecord(_Required, total=False):
    """One submission: the job, and where and how it was started."""

    host: str
    command: list[str]  # sys.argv
    folder: str  # the ranks' working folder: where the first command of the run was typed
    commit: str | None  # of the user's repository, or of Laststep's clone; ranks that another launcher starts lack it
    version: str  # Laststep's
    job_name: str  # Slurm's name for the job
    tag: str  # in the comment of a job that Laststep submitted: its id may be given to another job one day


def read_submissions(path: Path) -> list[SubmissionRecord]:
    """The submissions in a file, oldest first. A damaged line is skipped; a file that does not exist has none."""
    return [cast("SubmissionRecord", line) for line in read_lines(path) if _Required.__required_keys__ <= line.keys()]

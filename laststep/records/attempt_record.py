"""The record of one attempt, as attempts.jsonl and attempt.json have it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from laststep.ranks.world import start_text
from laststep.records.metrics import read_lines

# Why an attempt ended. "lost": it could not record its end, so the next attempt or the batch shell did.
Reason = Literal["finished", "preempted", "timeout", "cancelled", "failed", "hung", "lost"]


class _Attempt(TypedDict):
    """The fields that have the same type before and after the end. Times are Unix seconds."""

    attempt: int  # 0 for the first of the run
    job_id: str
    chain: str | None  # the chain of jobs that this one belongs to, see launch.chain
    restart: int  # how often Slurm had requeued the job
    step_id: int | None  # which start of the ranks within the allocation, see World; None where that is not known
    step_restarts: int  # how often the ranks had been started again within that step
    hosts: list[str]
    world_size: int
    start: float
    job_start: float | None  # of this start of its job, as Slurm says; None where it does not
    start_step: int
    end_step: int  # the last step done
    lost_steps: int  # done, but in no checkpoint
    lost_s: float  # seconds that these steps took
    step_s: float | None  # mean seconds of a step, None when none was done
    save_s: float | None  # seconds that the training loop stood still for saves; None when that is not known
    requeue: bool  # whether the run continues by itself: its ranks, or its job, are started again
    error: str | None
    blamed: list[str]  # the hosts whose fault the end seems to be


class OpenAttempt(_Attempt):
    """An attempt that runs, or that could not record its end."""

    end: None
    reason: None


class EndedAttempt(_Attempt):
    """An attempt whose end is recorded."""

    end: float
    reason: Reason


# `if record["reason"]` distinguishes the two, for mypy too.
AttemptRecord = OpenAttempt | EndedAttempt

# Fields that a run of an older version does not have.
_DEFAULTS: dict[str, Any] = {
    "chain": None,
    "step_id": None,
    "step_restarts": 0,
    "job_start": None,
    "lost_s": 0.0,
    "step_s": None,
    "save_s": None,
    "requeue": False,
    "error": None,
    "blamed": [],
}
_REQUIRED = OpenAttempt.__required_keys__ - _DEFAULTS.keys()


def record_start(record: AttemptRecord) -> str:
    """The start of the ranks, as `World.start` has it: what its rank 0 signs the run's lock with."""
    return start_text(record["job_id"], record["restart"], record["step_id"], record["step_restarts"])


def start_of(record: AttemptRecord) -> str:
    """Which start of the ranks this is within its allocation, as a suffix of the job id: as sacct writes a step, with
    the number of restarts within it (`.2+1`). Empty for the first."""
    step, again = record["step_id"] or 0, record["step_restarts"]
    return f".{step}+{again}" if again else f".{step}" if step else ""


def reason_in(error: str | None) -> str:
    """An attempt's error in one line, the first that matters: the exception below its traceback, whose text may have
    further lines, of advice; else the first line of the text. Empty without an error."""
    text = (error or "").strip()
    head, _, rest = text.partition("\n")
    exceptions = _EXCEPTION.findall(text)
    reason = exceptions[-1] if exceptions and ": gone (" not in head else head
    if reason.endswith(" failed:"):  # an error that explains itself in one line
        reason = rest.partition("\n")[0]
    return "".join(letter if letter.isprintable() else " " for letter in reason)


def rank_in(error: str | None) -> str:
    """The rank whose error an attempt's error is, as `rank 1 on n2`; empty where it is none's."""
    found = re.match(r"(rank \d+ on \S+) (failed|lost contact):", error or "")
    return found[1] if found else ""


def in_one_line(error: str | None) -> str:
    """An attempt's error as `rank 1 on n2 failed: ValueError: bad sample (own.py, line 12, in step)`."""
    head, reason, place = (error or "").strip().partition("\n")[0], reason_in(error), users_line_in(error)
    whole = head if reason == head else f"{head} {reason}"
    return f"{whole} ({place})" if place else whole


def users_line_in(error: str | None) -> str:
    """The innermost line of the user's code in an attempt's error, as `own.py, line 12, in step`; empty where a
    traceback has none."""
    frames = [(path, rest) for path, rest in _FRAME.findall(error or "") if not _NOT_THE_USERS.search(path)]
    return f"{frames[-1][0].rpartition('/')[2]}, {frames[-1][1]}" if frames else ""


_EXCEPTION = re.compile(r"Traceback.*\n(?: .*\n)*(\S.*)")
_FRAME = re.compile(r'^ *File "(.+)", (line \d+, in .+)$', re.MULTILINE)
_ROOMS = "attempt|checkpoint|cli|code|compat|config|data|frameworks|job|loops|observe|optim|ranks|records|runs|tasks"
_NOT_THE_USERS = re.compile(
    rf"/(site|dist)-packages/|/lib/python3|/laststep/({_ROOMS})/|/laststep/(say|task|trainer|rundir|__\w+__)\.py$|^<"
)


def read_attempts(path: Path) -> list[AttemptRecord]:
    """The attempts in a file, in its order. A damaged line is skipped; a file that does not exist has none."""
    return [cast("AttemptRecord", {**_DEFAULTS, **line}) for line in read_lines(path) if line.keys() >= _REQUIRED]


def read_ended_attempts(path: Path) -> list[EndedAttempt]:
    """Like `read_attempts`, but only the attempts whose end is recorded."""
    return [record for record in read_attempts(path) if record["reason"]]


def done_by(records: Sequence[AttemptRecord], step: int) -> EndedAttempt | None:
    """The attempt that did a step and kept it, of those that have ended; None: nobody has, or one that trains now."""
    kept = (r for r in records if r["reason"] and r["start_step"] < step <= r["end_step"] - r["lost_steps"])
    return next(reversed(list(kept)), None)

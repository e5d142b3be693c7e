"""attempts.jsonl: how each attempt of a run began and ended, and whether the run goes on by itself.

While an attempt runs it stands in attempt.json. Any of its ranks may end it, several at once and on several hosts, and
any of them may die while it does, so that an end is:
    1. write the whole record aside
    2. rename attempt.json to attempt.ended.json: only one rank can, and that rank's record counts
    3. rename the record over attempt.ended.json
    4. put attempts.jsonl in place anew, with the record added, and remove attempt.ended.json
Who finds attempt.ended.json does step 4 again, which comes out the same however often and by however many it is done.
An attempt that could not say how it ended (a power cut, SIGKILL of every rank) leaves attempt.json behind, and the next
one enters it as lost.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from trainer.config.schema import Launch
from trainer.records.attempt_record import AttemptRecord
from trainer.records.metrics import read_lines
from trainer.records.retry import goes_on
from trainer.rundir import RunDir
from trainer.world.world import World


def begin_attempt(run: RunDir, world: World, start_step: int) -> AttemptRecord:
    """The attempt begins, at the state of `start_step`. Rank 0 alone calls this, before it rewinds metrics.jsonl, where
    what a lost attempt had reached still stands."""
    settle(run, lambda: start_step, returned=world.job_id)
    record: AttemptRecord = {
        "attempt": len(read_lines(run.attempts)),
        "job_id": world.job_id,
        "restart": world.restart,
        "hosts": _names(world.hosts),
        "world_size": world.size,
        "start": time.time(),
        "end": None,
        "start_step": start_step,
        "end_step": start_step,
        "reason": None,
        "lost_steps": 0,
        "lost_s": 0.0,
        "step_s": None,
        "requeue": False,
        "error": None,
    }
    _written_aside(run.attempt_now, json.dumps(record)).replace(run.attempt_now)
    return record


def end_attempt(
    run: RunDir,
    world: World,
    launch: Launch,
    reason: str,
    end_step: int,
    kept_step: int,
    lost_s: float | None = None,
    step_s: float | None = None,
    error: str | None = None,
    retry: bool = True,
) -> AttemptRecord | None:
    """Any rank says how its attempt ended; returns the record, or None when another rank was first.

    `end_step` is the last step done and `kept_step` that of the state saved; `lost_s`, the seconds spent on the steps
    between, are taken from metrics.jsonl when None; `step_s` is the mean of a step's, None when none was done. `retry`
    is False for an error that would only repeat.
    Raises OSError when the disk refuses: another rank may try, or the next attempt enters this one as lost.
    """
    record = next(iter(read_lines(run.attempt_now)), None)
    if record is None or not is_of(record, world):  # the rank of an older attempt, still on its way out
        return None
    # Ended while it began, by a rank that had not been told yet where.
    end_step, kept_step = max(end_step, record["start_step"]), max(kept_step, record["start_step"])
    record |= {
        "hosts": _names(
            [*record["hosts"], *world.hosts]
        ),  # some launchers tell of one's own alone, before the ranks meet
        "end": time.time(),
        "end_step": end_step,
        "reason": reason,
        "lost_steps": end_step - kept_step,
        "lost_s": _lost_seconds(run, record["start"], kept_step) if lost_s is None else lost_s,
        "step_s": step_s,
        "error": error,
    }
    # Elsewhere than on Slurm nobody starts it again.
    record["requeue"] = world.on_slurm and goes_on([*read_lines(run.attempts), record], launch, retry)
    whole = _written_aside(run.attempt_ended, json.dumps(record))
    try:
        run.attempt_now.rename(run.attempt_ended)
    except FileNotFoundError:
        whole.unlink()
        return None
    whole.replace(run.attempt_ended)
    _enter(run, record)
    run.attempt_ended.unlink(missing_ok=True)
    return record


def all_ends(run: RunDir, kept_step: Callable[[], int], returned: str | None = None) -> list[AttemptRecord]:
    """Every attempt's end; that of one which could not say how it ended as `settle` would enter it."""
    ends = read_lines(run.attempts)
    for left in (run.attempt_ended, run.attempt_now):
        for record in read_lines(left):
            if record["attempt"] not in {end["attempt"] for end in ends}:
                came_back = record["job_id"] == returned
                ends.append(record if record["reason"] else _as_lost(run, left, record, kept_step(), came_back))
    return ends


def settle(run: RunDir, kept_step: Callable[[], int], returned: str | None = None) -> None:
    """Enter what an attempt left behind that could not say, or not enter, how it ended.

    `kept_step` finds that of the newest checkpoint, only when it is asked, and `returned` is the job that came back by
    itself.
    """
    for record in all_ends(run, kept_step, returned):
        _enter(run, record)
    run.attempt_ended.unlink(missing_ok=True)
    run.attempt_now.unlink(missing_ok=True)


def record_of(run: RunDir, world: World) -> AttemptRecord | None:
    """The record of this attempt, once it has ended."""
    return next((record for record in reversed(read_lines(run.attempts)) if is_of(record, world)), None)


def is_of(record: AttemptRecord, world: World) -> bool:
    """Whether the record is that of this attempt."""
    if world.number is not None:
        return bool(record["attempt"] == world.number)
    return (record["job_id"], record["restart"]) == (world.job_id, world.restart)


def _names(hosts: Iterable[str]) -> list[str]:
    """Each once, those that are not known left out."""
    return list(dict.fromkeys(filter(None, hosts)))


def _as_lost(run: RunDir, left: Path, record: AttemptRecord, kept_step: int, requeue: bool) -> AttemptRecord:
    """What metrics.jsonl tells of an attempt that told nothing but what stands in the file that it `left`."""
    last_sign = run.metrics if run.metrics.exists() else left
    # What an attempt before it had reached and not kept may still stand there, and was lost then.
    done = [line for line in read_lines(run.metrics) if line.get("time", 0) >= record["start"]]
    reached = max(kept_step, record["start_step"], *(line["step"] for line in done))
    return record | {
        "end": max(record["start"], last_sign.stat().st_mtime),
        "end_step": reached,
        "reason": "lost",
        "lost_steps": reached - kept_step,
        "lost_s": _lost_seconds(run, record["start"], kept_step),
        "step_s": (done[-1]["time"] - done[0]["time"]) / (len(done) - 1) if len(done) > 1 else None,
        "requeue": requeue,
    }


def _lost_seconds(run: RunDir, start: float, kept_step: int) -> float:
    """Seconds from the step that was kept to the last one done, both as metrics.jsonl has them."""
    times = {line["step"]: float(line["time"]) for line in read_lines(run.metrics) if "time" in line}
    # A step kept by an earlier attempt: this one spent its time from its own start on.
    since = max(start, times.get(kept_step, start))
    return max(0.0, max(times.values(), default=since) - since)


def _enter(run: RunDir, record: AttemptRecord) -> None:
    """Add a record to attempts.jsonl, unless it is there, by putting the whole file in place anew."""
    if record["attempt"] in {entered["attempt"] for entered in read_lines(run.attempts)}:
        return
    before = run.attempts.read_text(errors="replace") if run.attempts.exists() else ""
    end_of_line = "" if before.endswith("\n") or not before else "\n"
    _written_aside(run.attempts, before + end_of_line + json.dumps(record)).replace(run.attempts)
    folder = os.open(run.path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _written_aside(path: Path, text: str) -> Path:
    """A file beside `path`, this thread's own, that holds `text` and survives a power cut."""
    aside = path.with_name(f"{path.name}.{socket.gethostname()}-{threading.get_native_id()}.tmp")
    with aside.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    return aside

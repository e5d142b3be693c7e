"""attempts.jsonl: how each attempt of a run began and ended, and whether the run continues by itself.

While an attempt runs, its record is in attempt.json. Any of its ranks may end the attempt, several at once and on
several hosts, and any of them may die while it does. So a rank ends an attempt in these steps:
    1. write the complete record to a temporary file
    2. rename attempt.json to attempt.ended.json: only one rank can, and its record counts
    3. rename the temporary file to attempt.ended.json
    4. replace attempts.jsonl by a copy with the record added, and remove attempt.ended.json
Any process that finds attempt.ended.json repeats step 4. The result is the same however often, and by however many, it
is repeated.
An attempt that could not record its end (a power cut, SIGKILL of every rank) leaves attempt.json behind: the attempt is
abandoned. The batch shell or the next attempt then records it as lost.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laststep.config.schema import Launch
from laststep.ranks.disk import NO_PATIENCE, Patience, look_anew
from laststep.ranks.fault import Retry
from laststep.ranks.slurm import CHAIN_VARIABLE, job_start
from laststep.ranks.world import World
from laststep.records.attempt_record import EndedAttempt, OpenAttempt, Reason, read_attempts, read_ended_attempts
from laststep.records.metrics import is_step, read_lines
from laststep.records.retry import Next, decide
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir, aside, fsync, write_whole


def begin_attempt(run: RunDir, world: World, start_step: int, patience: Patience = NO_PATIENCE) -> OpenAttempt:
    """Record that the attempt begins, with the state of `start_step`.

    Only rank 0 calls this, and before it rewinds metrics.jsonl, which still shows how far a lost attempt came. Raises
    OSError when the disk refuses for longer than the `patience`.
    """
    patience.insist(lambda: record_abandoned_attempts(run, lambda: start_step, continued_job=world.job_id))
    # Not the count of the records: a damaged one is skipped, and a number must not be used twice.
    before = patience.insist(lambda: read_attempts(run.attempts))
    if not before and start_step:  # this host may only believe that there is no such file
        look_anew(run.path)
        before = patience.insist(lambda: read_attempts(run.attempts))
    number = 1 + max((record["attempt"] for record in before), default=-1)
    record: OpenAttempt = {
        "attempt": number,
        "job_id": world.job_id,
        "chain": os.environ.get(CHAIN_VARIABLE) if world.on_slurm else None,
        "restart": world.restart,
        "step_id": world.step_id,
        "step_restarts": world.step_restarts or 0,
        "hosts": _unique_names(world.hosts),
        "world_size": world.size,
        "start": time.time(),
        "job_start": job_start(os.environ) if world.on_slurm else None,
        "end": None,
        "start_step": start_step,
        "end_step": start_step,
        "reason": None,
        "lost_steps": 0,
        "lost_s": 0.0,
        "step_s": None,
        "save_s": None,
        "requeue": False,
        "error": None,
        "blamed": [],
    }
    patience.insist(lambda: _write_temporary(run.attempt_now, json.dumps(record)).replace(run.attempt_now))
    _keep_reserve(run)
    return record


def lower_start_step(run: RunDir, world: World, step: int) -> None:
    """The checkpoint that this attempt was to begin at is damaged: it begins at this earlier step.

    A lost attempt kept what the next one begins at, so if the one before was lost, its record is corrected too. Only
    rank 0 calls this, and before it rewinds metrics.jsonl.
    """
    correct_lost_attempt(run, lambda: step)
    for record in read_attempts(run.attempt_now):
        if belongs_to(record, world):
            corrected = json.dumps({**record, "start_step": step, "end_step": step})
            _write_temporary(run.attempt_now, corrected).replace(run.attempt_now)
            if run.attempt_ended.exists() or find_record(run, world):  # another rank has ended the attempt meanwhile
                run.attempt_now.unlink(missing_ok=True)


def correct_lost_attempt(run: RunDir, kept_step: Callable[[], int]) -> None:
    """If the newest ended attempt was lost, and has kept an earlier step than its record says, correct the record, and
    those of later attempts that did no step: they ended before anybody had read the checkpoint.

    `kept_step` finds the step of the newest checkpoint; it is called only if that is needed.
    """
    kept_step = cache(kept_step)
    for record in reversed(read_ended_attempts(run.attempts)):
        lost, did_nothing = record["reason"] == "lost", record["start_step"] == record["end_step"]
        said = record["end_step"] - record["lost_steps"]
        if not (lost or did_nothing) or not said or (kept := kept_step()) >= said:
            return
        if lost:
            lost_s = _lost_seconds(run, record["start"], kept)
            return correct(run, record, {**record, "lost_steps": record["end_step"] - kept, "lost_s": lost_s})
        correct(run, record, {**record, "start_step": kept, "end_step": kept})


def recorded_step(run: RunDir) -> int:
    """The step that was saved last, by the records; 0 if none was. A later one may have been saved since.

    Raises OSError if the records cannot be read.
    """
    # In this order: an attempt that is ended meanwhile moves to the file that is read next.
    records = [record for path in (run.attempt_now, run.attempt_ended, run.attempts) for record in read_attempts(path)]
    # Of the two records of one attempt, the complete one.
    newest = max(records, key=lambda record: (record["attempt"], record["reason"] is not None), default=None)
    if newest is None:
        return 0
    return newest["end_step"] - newest["lost_steps"] if newest["reason"] else newest["start_step"]


def raise_kept_step(run: RunDir, step: int) -> None:
    """This attempt begins at the intact checkpoint of `step`. If the one before has kept an earlier step by its record,
    correct that: a rank that was suspended saved a later one when it woke, or a disk did not show that one. Only rank 0
    calls this."""
    ended = read_ended_attempts(run.attempts)
    for number, record in reversed(list(enumerate(ended))):
        did_nothing = number and record["start_step"] == record["end_step"]  # an attempt before it saved the step
        if did_nothing and record["end_step"] == step:  # it may have ended before it corrected those before it
            continue
        if record["reason"] == "finished" or step <= record["end_step"] - record["lost_steps"]:
            return
        if did_nothing:
            correct(run, record, {**record, "start_step": step, "end_step": step})
            continue
        end_step = max(step, record["end_step"])
        lost_s = _lost_seconds(run, record["start"], step) if end_step > step else 0.0
        return correct(run, record, {**record, "end_step": end_step, "lost_steps": end_step - step, "lost_s": lost_s})


def correct(run: RunDir, record: EndedAttempt, corrected: EndedAttempt) -> None:
    """Replace the record of an ended attempt. Raises OSError when the disk refuses."""
    lines = run.attempts.read_text(errors="replace").splitlines()
    last = max(number for number, line in enumerate(lines) if f'"attempt": {record["attempt"]},' in line)
    _replace_attempts(run, "\n".join([*lines[:last], json.dumps(corrected), *lines[last + 1 :]]))


def end_attempt(
    run: RunDir,
    world: World,
    launch: Launch,
    reason: Reason,
    end_step: int,
    kept_step: int,
    lost_s: float | None = None,
    step_s: float | None = None,
    save_s: float | None = None,
    error: str | None = None,
    retry: Retry = "yes",
    blamed: Iterable[str] = (),
    patience: Patience = NO_PATIENCE,
) -> EndedAttempt | None:
    """Record how the attempt ended. Any rank may; returns the record, or None when another rank was first.

    `end_step` is the last step done, `kept_step` that of the newest checkpoint. `lost_s` is the time that the steps
    between them took, by default that which metrics.jsonl shows; `step_s` is the mean time of a step, None when none
    was done; `save_s` is how long the loop stood still for saves. `retry`: whether the error may be gone at the next
    attempt. `blamed`: hosts whose fault it seems to be.
    Raises OSError when the disk refuses for longer than the `patience`: another rank may try, or the next attempt
    records this one as lost.
    """
    open_record = next(iter(patience.insist(lambda: read_attempts(run.attempt_now))), None)
    if open_record is None or not belongs_to(open_record, world):  # this rank is of an older attempt, and about to exit
        return None
    # A rank that ends the attempt before the ranks have met does not know the start step yet.
    end_step, kept_step = max(end_step, open_record["start_step"]), max(kept_step, open_record["start_step"])
    if lost_s is None:
        lost_s = patience.insist(lambda: _lost_seconds(run, open_record["start"], kept_step))
    record: EndedAttempt = {
        **open_record,
        # Under some launchers a rank knows only its own host until the ranks have met.
        "hosts": _unique_names([*open_record["hosts"], *world.hosts]),
        "end": time.time(),
        "end_step": end_step,
        "reason": reason,
        "lost_steps": end_step - kept_step,
        "lost_s": lost_s,
        "step_s": step_s,
        "save_s": save_s,
        "error": error,
        "blamed": list(blamed),
    }
    if world.on_slurm or world.supervised:  # nothing else starts a run again by itself
        ended = [*patience.insist(lambda: read_ended_attempts(run.attempts)), record]
        submissions = patience.insist(lambda: read_submissions(run.submissions))
        follows = decide(ended, launch, retry, submissions, local=not world.on_slurm).what
        record["requeue"] = follows is not Next.END
    return record if _enter(run, record, patience) else None


def _enter(run: RunDir, record: EndedAttempt, patience: Patience) -> bool:
    """End the attempt in the steps that are named at the top; returns whether this rank has, not another."""
    complete = patience.insist(lambda: _write_temporary(run.attempt_ended, json.dumps(record)))
    refused = False

    def claim() -> bool:
        """Take attempt.json away, which one rank can. Returns whether this one has."""
        nonlocal refused
        try:
            run.attempt_now.rename(run.attempt_ended)
        except FileNotFoundError:  # else a rename that was reported as failed has happened
            return refused and any(not found["reason"] for found in read_attempts(run.attempt_ended))
        except OSError:
            refused = True
            raise
        return True

    if not patience.insist(claim):
        complete.unlink(missing_ok=True)
        return False
    patience.insist(lambda: _replace_unless_done(complete, run.attempt_ended))
    patience.insist(lambda: _add_record(run, record))
    with contextlib.suppress(OSError):  # who finds it adds the same record again, which changes nothing
        run.attempt_ended.unlink(missing_ok=True)
    return True


def _replace_unless_done(complete: Path, path: Path) -> None:
    """Give a file its final name. An error of a rename that has happened is none."""
    try:
        complete.replace(path)
    except OSError:
        if complete.exists():
            raise


def ended_attempts(
    run: RunDir, kept_step: Callable[[], int], continued_job: str | None = None, blamed: Sequence[str] = ()
) -> list[EndedAttempt]:
    """Every ended attempt, oldest first, with an abandoned one as `record_abandoned_attempts` would record it."""
    ended = read_ended_attempts(run.attempts)
    for file in (run.attempt_ended, run.attempt_now):
        for record in read_attempts(file):
            if record["attempt"] not in {other["attempt"] for other in ended}:
                if not record["reason"]:
                    chain = record["chain"] is not None and record["chain"] == os.environ.get(CHAIN_VARIABLE)
                    continued = continued_job is not None and (record["job_id"] == continued_job or chain)
                    lost = _lost_record(run, file, record, kept_step(), continued)
                    record = {**lost, "blamed": list(blamed)}
                ended.append(record)
    return ended


def record_abandoned_attempts(
    run: RunDir, kept_step: Callable[[], int], continued_job: str | None = None, blamed: Sequence[str] = ()
) -> None:
    """Record the end of an attempt that could not record it itself, or not completely.

    `kept_step` finds the step of the newest checkpoint; it is called only if that is needed. `continued_job` is the
    job in which the run continues, if any, or one of its chain, and `blamed` the nodes that lost it.
    """
    for record in ended_attempts(run, kept_step, continued_job, blamed):
        _add_record(run, record)
    run.attempt_ended.unlink(missing_ok=True)
    run.attempt_now.unlink(missing_ok=True)


def find_record(run: RunDir, world: World) -> EndedAttempt | None:
    """The record of this attempt, once it has ended."""
    records = read_ended_attempts(run.attempts)
    return next((record for record in reversed(records) if belongs_to(record, world)), None)


def belongs_to(record: OpenAttempt | EndedAttempt, world: World) -> bool:
    """Whether the record is that of this attempt; for the batch shell, which knows no step, of any in this start of the
    job."""
    if world.number is not None:
        return record["attempt"] == world.number
    start = (record["step_id"], record["step_restarts"])
    same_step = world.step_id is None or (world.step_id, world.step_restarts or 0) == start
    return same_step and (record["job_id"], record["restart"]) == (world.job_id, world.restart)


def never_began(run: RunDir, world: World, restarts: int | None) -> bool:
    """Whether the batch shell has recorded that this start of the ranks ended before any attempt began.

    `restarts`: how often the shell had started the ranks before, in this allocation; None without such a shell. Each of
    these starts has a record too, and so has each restart within a step. The shell does not know Slurm's step.
    """
    if restarts is None:
        return False
    of_job = [r for r in read_ended_attempts(run.attempts) if belongs_to(r, replace(world, step_id=None))]
    earlier = restarts + count_in_steps(run.step_restart, world)
    return len(of_job) > earlier and of_job[-1]["step_id"] is None


def _unique_names(hosts: Iterable[str]) -> list[str]:
    """Each name once. The name of a host that is not known yet is empty, and left out."""
    return list(dict.fromkeys(filter(None, hosts)))


def _lost_record(run: RunDir, file: Path, record: OpenAttempt, kept_step: int, requeue: bool) -> EndedAttempt:
    """The end of an abandoned attempt, of which only `record`, in `file`, and metrics.jsonl are left."""
    last_sign = run.metrics if run.metrics.exists() else file
    # Lines from before its start are of an earlier attempt, which recorded them as lost.
    done = [line for line in read_lines(run.metrics) if is_step(line) and line["time"] >= record["start"]]
    end_step = max(kept_step, record["start_step"], *(line["step"] for line in done))
    return {
        **record,
        "end": max(record["start"], last_sign.stat().st_mtime),
        "end_step": end_step,
        "reason": "lost",
        "lost_steps": end_step - kept_step,
        "lost_s": _lost_seconds(run, record["start"], kept_step),
        "step_s": (done[-1]["time"] - done[0]["time"]) / (len(done) - 1) if len(done) > 1 else None,
        "requeue": requeue,
    }


def _lost_seconds(run: RunDir, start: float, kept_step: int) -> float:
    """Seconds from the step that was kept to the last one done, by their times in metrics.jsonl."""
    times = {line["step"]: float(line["time"]) for line in read_lines(run.metrics) if is_step(line)}
    # When an earlier attempt did the kept step, this one has lost all of its time.
    since = max(start, times.get(kept_step, start))
    return max(0.0, max(times.values(), default=since) - since)


def _add_record(run: RunDir, record: EndedAttempt) -> None:
    """Add a record to attempts.jsonl, unless it is there already, by replacing the whole file. Raises OSError, also if
    there must be earlier records and this host does not see the file."""
    if record["attempt"] in {other["attempt"] for other in read_attempts(run.attempts)}:
        return
    before = run.attempts.read_text(errors="replace") if record["attempt"] or run.attempts.exists() else ""
    end_of_line = "" if before.endswith("\n") or not before else "\n"
    _replace_attempts(run, before + end_of_line + json.dumps(record))


def _replace_attempts(run: RunDir, text: str) -> None:
    """Replace the whole of attempts.jsonl, so that it survives a power cut."""
    _write_temporary(run.attempts, text).replace(run.attempts)
    fsync(run.path)


def _write_temporary(path: Path, text: str) -> Path:
    """Write `text` to a temporary file next to `path`, and fsync it; returns its path. If the disk has no room, it gets
    that of the run's reserve."""
    try:
        return _write_beside(path, text)
    except OSError as error:
        reserve = RunDir(path.parent).reserve
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not reserve.exists():
            raise
        reserve.unlink(missing_ok=True)
        return _write_beside(path, text)


def _write_beside(path: Path, text: str) -> Path:
    temporary = aside(path)
    try:
        with temporary.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # else it would take room that a retry needs
            temporary.unlink(missing_ok=True)
        raise
    return temporary


RESERVE_BYTES = 256 << 10  # attempts.jsonl of some hundred attempts that failed with a traceback each


def _keep_reserve(run: RunDir) -> None:
    """Hold room on the disk for the records of this attempt's end."""
    temporary = aside(run.reserve)
    with contextlib.suppress(OSError):
        if not run.reserve.exists():
            try:
                temporary.write_bytes(os.urandom(RESERVE_BYTES))  # random: some file systems compress
                temporary.rename(run.reserve)
            finally:
                temporary.unlink(missing_ok=True)


class Answer(NamedTuple):
    """What follows an attempt."""

    after: str  # the attempt's name, see World
    again: bool  # whether the ranks start again
    job_id: str
    restart: int
    starts: int  # how often ranks were started again within a step, in this start of the job


def write_answer(path: Path, world: World, again: bool) -> None:
    """Answer the supervisors of all ranks; repeated, it changes nothing. Raises OSError when the disk refuses."""
    before = _read(path)
    starts = before.starts if before and (before.job_id, before.restart) == (world.job_id, world.restart) else 0
    if before and before.after == world.attempt:
        starts -= before.again
    answer = Answer(world.attempt, again, world.job_id, world.restart, starts + again)
    write_whole(path, json.dumps(answer._asdict()))


def read_answer(path: Path) -> Answer | None:
    """The newest answer, None if there is none that can be read."""
    with contextlib.suppress(OSError):
        return _read(path)
    return None


def _read(path: Path) -> Answer | None:
    """The newest answer, None if there is none. Raises OSError when the disk does not say."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return Answer(**json.loads(path.read_text()))
    return None


def count_in_steps(path: Path, world: World) -> int:
    """How often ranks were started again within a step, in this start of the job."""
    answer = read_answer(path)
    return answer.starts if answer and (answer.job_id, answer.restart) == (world.job_id, world.restart) else 0

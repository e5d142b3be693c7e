"""The status of a run: from Slurm's queue, and from its own files once its job has left the queue. What a
run's time was spent on.

Slurm's accounting is not used. Ask the queue before reading the files: a run that ends in between is then found to have
ended. In the other order it would look lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from laststep.checkpoint.store import newest_step as newest_checkpoint
from laststep.config.errors import ConfigError
from laststep.ranks import disk
from laststep.ranks.process import lives_here
from laststep.ranks.slurm import UNENDED, is_job_id
from laststep.records.attempt_record import AttemptRecord, EndedAttempt, Reason, read_attempts, reason_in
from laststep.records.attempts import ended_attempts
from laststep.records.metrics import StepLine, is_step, last_lines, newest_step, steps_from
from laststep.records.plan import read_plan
from laststep.records.retry import FAILURES
from laststep.records.submissions import SubmissionRecord, open_intents, read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.queue import CLOCKS_S, NO_ANSWER, Job, Owner, Queue, owners, submissions_of, why_unclear
from laststep.say import command

READ_THREADS = 16  # on a network file system each waits for its run's files
JUST_SUBMITTED_S = 10.0  # a job may be younger than squeue's answer
BY_ITSELF = "resumes by itself: steps lost are its own"  # a command that does not know Laststep
NOT_ANSWERED = "sbatch has not answered; a job may be in the queue"
JUST_STARTED_S = 120.0  # the most that a rank on this machine takes to import torch
LAST_LINES_S = 30.0  # how long a rank may take to leave
ALIVE = ("queued", "requeued", "starting", "running", "restarting", "stopping", "unknown")
WAITING = ("queued", "requeued", "starting", "restarting")  # for its next attempt
# The state of a run without a job, by the reason of its last attempt in attempts.jsonl.
FINAL_STATE: dict[Reason, str] = {
    "finished": "finished",
    "failed": "failed",
    "hung": "failed",
    "lost": "lost",
    "cancelled": "cancelled",
    "preempted": "stopped",
    "timeout": "stopped",
}
STATES = tuple(dict.fromkeys((*ALIVE, *FINAL_STATE.values())))


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    `state` is queued, requeued, starting (its job runs, its ranks do not yet), running, restarting (after a fault),
    stopping, finished, failed, lost, cancelled, stopped, or unknown where Slurm does not say. `why` explains it, e.g.
    what a queued job is waiting for. Times are in seconds. `goodput` is the share of the allocated time that was spent
    on steps that were kept.
    """

    run: str
    job_id: str | None
    state: str
    why: str
    starts_at: float | None
    step: int | None
    total_steps: int | None
    epoch: int | None
    loss: float | None
    samples_per_s: float | None
    eta_s: float | None
    attempts: int
    lost_steps: int
    goodput: float | None
    started_at: float | None  # the start of the first attempt
    rank_hours: float  # hours in attempts, times ranks; a rank is a GPU where there are any
    folder: str

    @property
    def alive(self) -> bool:
        """Whether its job waits or runs, or may do so (unknown)."""
        return self.state in ALIVE


class StatusReader:
    """Reads the status of runs repeatedly: their files each time, the queue, which all users share, less often."""

    def __init__(self, queue_every_s: float = 10.0) -> None:
        self._every_s = queue_every_s
        self._queue: Queue | None = None

    def read(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """The status of each of these runs, in their order."""
        if self._queue is None or time.time() > self._queue.at + self._every_s:
            self._queue = Queue.ask(runs)
        return statuses_of(runs, self._queue)


def statuses_of(runs: Sequence[RunDir], queue: Queue) -> list[RunStatus]:
    """The status of each of these runs, in their order."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(lambda run: status_of(run, queue), runs))


def status_of(run: RunDir, queue: Queue) -> RunStatus:
    """The status of one run."""
    submissions, unclear = submissions_of(run, queue)
    records, counts_steps = records_of(run), not run.progress.exists()
    job = _find_job(run, queue, submissions, records)
    if unclear and job.found is None:
        job, state = _RunJob(None, None, unclear=False), State("unknown", NOT_ANSWERED)
    else:
        state = _state(run, job, submissions, records, queue)
    under_way = records[-1] if records and not records[-1]["reason"] else None
    records = settled(run, records, state.word in ALIVE)
    steps = [line for line in last_lines(run.metrics) if is_step(line)]
    plan = read_plan(run.plan)
    step = steps[-1] if steps else None
    done = step["step"] if step else records[-1]["end_step"] if records and counts_steps else None
    total, batch_size = (plan["total_steps"], plan["batch_size"]) if plan else (None, None)
    rate = _rate(steps, under_way["start"] if under_way else 0.0)
    left_s = None
    if total and batch_size and done is not None and rate and state.word in ("starting", "running"):
        left_s = (total - done) * batch_size / rate
    now = step["time"] if step and state.word == "lost" else time.time()  # a dead attempt uses no more time
    in_attempt = step["step"] if step and under_way and step["time"] >= under_way["start"] else None
    return RunStatus(
        run=run.name,
        job_id=job.id,
        state=state.word,
        why=state.why if counts_steps else ", ".join(filter(None, [state.why, BY_ITSELF])),
        starts_at=job.found.starts_at if job.found and job.found.state == "PENDING" else None,
        step=done,
        total_steps=total,
        epoch=step.get("epoch") if step else None,
        loss=step.get("loss") if step else None,
        samples_per_s=rate,
        eta_s=left_s,
        started_at=records[0]["start"] if records else None,
        rank_hours=sum(((r["end"] or now) - r["start"]) * r["world_size"] for r in records) / 3600,
        attempts=len(records),
        lost_steps=sum(record["lost_steps"] for record in records),
        folder=str(run.path),
        goodput=goodput_of(records, in_attempt, batch_size / rate if batch_size and rate else None, now)
        if counts_steps
        else None,
    )


def time_of(status: RunStatus) -> TimeSplit:
    """What the run's time was spent on, in seconds. Reads more of its files than its status takes."""
    run, waits = RunDir(status.folder), status.state in WAITING and status.job_id is not None
    waiting = Waiting(status.job_id or "", in_place=status.state == "restarting") if waits else None
    records, submissions = records_of(run), read_submissions(run.submissions)
    return split_time(records, submissions, run.metrics, time.time(), status.alive, waiting)


def records_of(run: RunDir) -> list[AttemptRecord]:
    """Every attempt so far, oldest first. The record of an attempt under way has no reason yet."""
    # In the order in which a record is moved when an attempt ends, so that it is not missed on its way.
    left = [record for path in (run.attempt_now, run.attempt_ended) for record in read_attempts(path)]
    records = read_attempts(run.attempts)
    for record in reversed(left):
        if record["attempt"] not in {entered["attempt"] for entered in records}:
            records.append(record)
    return records


def settled(run: RunDir, records: list[AttemptRecord], alive: bool) -> list[AttemptRecord]:
    """The `records` of a run; where none is `alive` that could end the last attempt, with that as the next attempt will
    record it: lost, after the last step in metrics.jsonl."""
    if alive or not records or records[-1]["reason"]:
        return records
    with contextlib.suppress(OSError):
        return [*ended_attempts(run, lambda: newest_checkpoint(run, lambda _: None))]
    return records


def jobs_of(run: RunDir) -> list[str]:
    """The ids of all jobs that were ever started for the run, oldest first."""
    known = [line["job_id"] for line in (*read_submissions(run.submissions), *records_of(run))]
    return list(dict.fromkeys(known))


def had_no_job(run: RunDir) -> bool:
    """Whether Slurm has never had a job of this run: it trains on this machine, if at all."""
    return not any(map(is_job_id, jobs_of(run))) and not open_intents(run.submissions)


def jobs_in_queue(run: RunDir, without_slurm: bool = False) -> list[str]:
    """The ids of the run's jobs that wait or run. Raises ConfigError in doubt.

    If squeue fails: none if `without_slurm`, else raises ConfigError.
    """
    if had_no_job(run):
        return []
    queue = Queue.ask([run])
    if queue.jobs is None and without_slurm:
        return []
    if queue.jobs is None:
        if queue.problem != NO_ANSWER:
            raise ConfigError(queue.problem)
        forced = command(f"resume {run_folders.typed(run)} --local --force")
        raise ConfigError(
            f"{run.name}: {NO_ANSWER}, so a job of this run may still be alive; try again, or if the cluster "
            f"is gone, train here: {forced}"
        )
    found = owners(run, queue, submissions_of(run, queue)[0], records_of(run))
    if unclear := [job_id for job_id, owner in found.items() if owner is Owner.UNCLEAR]:
        raise ConfigError(f"{run.name}: {why_unclear(unclear[0])}")
    return [job_id for job_id, owner in found.items() if owner is Owner.THIS_RUN]


class State(NamedTuple):
    """A run's state, and what explains it; see RunStatus."""

    word: str
    why: str = ""


class _RunJob(NamedTuple):
    """The run's newest job: its id, and the job where it is in the queue. `unclear`: it may also be another job."""

    id: str | None
    found: Job | None
    unclear: bool


def _find_job(
    run: RunDir, queue: Queue, submissions: Sequence[SubmissionRecord], records: Sequence[AttemptRecord]
) -> _RunJob:
    """The newest job of the run that is in the queue, else the newest of all. Of a chain: the first that is there, else
    the one that trained last."""
    chain = submissions[-1].get("chain") if submissions else None
    of_chain = {line["job_id"] for line in submissions if chain and line.get("chain") == chain}
    owned = owners(run, queue, submissions, records)
    if found := [job_id for job_id, owner in owned.items() if owner is not Owner.ANOTHER]:
        job_id = next((job_id for job_id in found if job_id in of_chain), found[-1])
        return _RunJob(job_id, (queue.jobs or {})[job_id], owned[job_id] is Owner.UNCLEAR)
    trained = [record["job_id"] for record in records if record["job_id"] in of_chain]
    known = trained or [line["job_id"] for line in (*records, *submissions)]
    return _RunJob(known[-1] if known else None, None, unclear=False)


def _state(
    run: RunDir, job: _RunJob, submissions: Sequence[SubmissionRecord], records: Sequence[AttemptRecord], queue: Queue
) -> State:
    last = records[-1] if records else None
    if is_finished(submissions, records):
        return State("finished")
    if job.id is None:
        return State("stopped", "never submitted")
    of_job = [record for record in records if record["job_id"] == job.id]
    newest = submissions[-1] if submissions and submissions[-1]["job_id"] == job.id else None
    last = last if last and last["job_id"] == job.id else None
    if not is_job_id(job.id):
        return _not_on_slurm(run, job.id, newest, records)
    if job.unclear:
        return State("unknown", why_unclear(job.id))
    if job.found:
        return _in_queue(run, job.id, job.found, of_job)
    final = last is not None and last["reason"] is not None and not last["requeue"]
    if not final:
        if queue.jobs is None:
            return State("unknown", queue.problem)
        if queue.unknown_owners and (uid := run.path.stat().st_uid) in queue.unknown_owners:
            return State("unknown", f"this machine does not know the owner of the run, uid {uid}")
        # An id that the queue shows is another's job. The command may have run on a host whose clock is ahead.
        age_s = queue.at - newest["time"] if newest else CLOCKS_S
        if -CLOCKS_S < age_s < JUST_SUBMITTED_S and job.id not in queue.jobs:
            return State("queued")
    if last is None and (log := run.logs / f"{job.id}_0_log.out").exists():
        return State("failed", f"job ended before its ranks began; see {log}")
    return _without_job(last)


def still_prints(run: RunDir) -> bool:
    """Whether the last lines of a run that has ended may be still to come: its end is recorded before rank 0 leaves."""
    ended_at = max((record["end"] or 0.0 for record in records_of(run)[-1:]), default=0.0)
    return time.time() < ended_at + LAST_LINES_S and disk.lock_holder(run.lock) is not None


def is_finished(submissions: Sequence[SubmissionRecord], records: Sequence[AttemptRecord]) -> bool:
    """Whether the run has reached its end, and was not submitted again since then to end later."""
    if not records or records[-1]["reason"] != "finished":
        return False
    known = {record["job_id"] for record in records}
    return all(line["job_id"] in known or line["time"] < records[-1]["start"] for line in submissions[-1:])


def _not_on_slurm(run: RunDir, job_id: str, newest: SubmissionRecord | None, records: Sequence[AttemptRecord]) -> State:
    """State and reason of a run whose ranks another launcher started, such as --local, as the job of this id."""
    last = records[-1] if records and records[-1]["job_id"] == job_id else None
    if at_work := disk.lock_holder(run.lock):
        return State("running", f"on {at_work.rpartition(' on ')[2]}")
    launcher_lives = newest is not None and _launcher_lives(job_id, newest)
    if last and not last["reason"] and launcher_lives:  # a file system without locks
        return State("running", "on this machine")
    if last and last["reason"] and last["requeue"] and launcher_lives:
        return State("restarting", f"its ranks have ended ({last['reason']})")
    if last:
        return _without_job(last)
    if newest and newest["time"] > time.time() - JUST_STARTED_S and launcher_lives:
        return State("starting", "its ranks are not up yet")
    never_up = "ended before its ranks were up"
    if not records:
        return State("stopped", never_up)
    return State(_without_job(records[-1]).word, f"the start after that attempt {never_up}")


def _launcher_lives(job_id: str, submission: SubmissionRecord) -> bool:
    """Whether the process runs here that has started the ranks of another launcher, such as --local."""
    if "process" in submission:
        return lives_here(submission["process"])
    pid = job_id.rpartition("-")[2]  # an older version
    return submission.get("host") == socket.gethostname() and pid.isdecimal() and os.path.exists(f"/proc/{pid}")


def _in_queue(run: RunDir, job_id: str, job: Job, of_job: Sequence[AttemptRecord]) -> State:
    """State and reason of a run whose job is in the queue; `of_job` holds its attempts in that job."""
    last = of_job[-1] if of_job else None
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "EXPEDITING", "SPECIAL_EXIT"):
        if last is None:
            return State("queued", job.reason)
        began = last["job_start"] or last["start"]
        if not job.submitted_at or job.submitted_at >= began:  # to Slurm a requeue is a submission
            return State("requeued", job.reason)
        # The queue was asked a few seconds ago, before the job started.
        job = replace(job, state="RUNNING", starts_at=began)
    if job.state not in UNENDED:
        return State("stopping", job.state.lower())
    why = "" if job.state == "RUNNING" else job.state.lower()
    if last and not last["reason"] and _is_at_work(run, job_id, job, last):
        return State("running", why)
    if last and last["reason"] and _ended_in(job, last):
        restarts = last["requeue"] and last["reason"] in FAILURES
        return State("restarting" if restarts else "stopping", f"its ranks have ended ({last['reason']})")
    return State("starting", why or "its ranks are not up yet")


def _is_at_work(run: RunDir, job_id: str, job: Job, record: AttemptRecord) -> bool:
    """Whether an attempt without an end is of this start of the job; else an earlier start has left its record.

    The clock of the node that has written the record may be minutes behind. So Slurm's own word comes first, which the
    record has by Slurm's clock, then the run's lock, and only then a comparison of two clocks.
    """
    if _is_of_start(job, record):
        return True
    holder = disk.lock_holder(run.lock) or ""
    return holder.startswith(f"job {job_id}, ") or record["start"] >= (job.starts_at or 0.0) - CLOCKS_S


def _ended_in(job: Job, record: EndedAttempt) -> bool:
    """Whether an attempt has ended in this start of the job."""
    if job.starts_at is None:
        return False
    return _is_of_start(job, record) if record.get("job_start") else record["end"] >= job.starts_at


def _is_of_start(job: Job, record: AttemptRecord) -> bool:
    """Whether Slurm says that the attempt is of this start of the job; False, too, where Slurm does not say."""
    began = record.get("job_start")
    return began is not None and job.starts_at is not None and abs(began - job.starts_at) <= 1


def _without_job(last: AttemptRecord | None) -> State:
    """State and reason of a run whose job has left the queue; `last` is the record of that job's last attempt."""
    if last is None:
        return State("cancelled", "job left the queue before it started")
    if last["reason"] is None:
        return State("lost", "job disappeared without recording why")
    if last["requeue"]:
        return State("cancelled", "job left the queue before it restarted")
    otherwise = {"hung": "a rank was stuck", "timeout": "time limit"}.get(last["reason"], "")
    return State(FINAL_STATE[last["reason"]], reason_in(last["error"]) or otherwise)


def _rate(steps: Sequence[StepLine], since: float) -> float | None:
    """Samples per second: the median of the newest steps, so that one slow step does not move the time left.

    Those of the attempt that began at `since` (Unix seconds) count alone once it has done one.
    """
    rates = [line["samples_per_s"] for line in steps if line["time"] >= since and line.get("samples_per_s")]
    rates = rates or [line["samples_per_s"] for line in steps if line.get("samples_per_s")]
    return statistics.median(rates) if rates else None


def goodput_of(records: Iterable[AttemptRecord], step: int | None, step_s: float | None, now: float) -> float | None:
    """Seconds spent on steps that were kept, divided by the seconds allocated until `now`.

    `step` (the last one done) and `step_s` (seconds per step) belong to the attempt under way.
    """
    allocated = kept = 0.0
    for record in records:
        allocated += (record["end"] if record["reason"] else now) - record["start"]
        end_step, mean_s = (record["end_step"], record["step_s"]) if record["reason"] else (step, step_s)
        kept += max(0, (end_step or 0) - record["lost_steps"] - record["start_step"]) * (mean_s or 0.0)
    return min(1.0, kept / allocated) if allocated > 0 else None


STOPS = ("preempted", "timeout", "cancelled")  # these end with a save
LEAST_SHARE = 0.0005  # smaller shares would be printed as 0.0%


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a run's time, by what they were spent on, from what every run records.

    Every second between the first submission and the run's end (or now) belongs to exactly one part, except while
    nobody wanted the run to continue: from the end of an attempt that was not continued until the next submission.

        queue       from the submission, or from the end of an attempt whose job was requeued, to the start of the job.
                    Where that start is not recorded (Slurm before 23.02, older versions of Laststep): to the start of
                    the attempt
        restarts    from the start of the job to an attempt's first step; from an attempt's last step to its end, if it
                    ended by fault; and from there to the next attempt in the same allocation
        lost steps  steps that were done, but not kept
        saves       the training loop stood still for a save. The attempt under way has not recorded that yet, and a
                    lost one could not. Attempts of older versions have only the last save of a stop
        training    everything else: steps that were kept, validation, waiting for data

    Times are those of the clock on the wall, whatever the number of ranks was.
    """

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
    job_id: str, previous: AttemptRecord | None, ended_at: float, until: float, submissions: Sequence[SubmissionRecord]
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

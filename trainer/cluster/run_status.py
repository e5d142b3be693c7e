"""How a run stands: what Slurm's queue says of its job, and what its own files say of the rest.

No accounting is asked. The queue must be asked before the files are read: a run that ends in between is then found to
have ended, while the other way round it would look lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainer.cluster.queue import Job, Queue
from trainer.records.attempt_record import AttemptRecord
from trainer.records.metrics import is_step, last_lines, read_lines
from trainer.rundir import RunDir
from trainer.world import run_lock
from trainer.world.slurm import is_job_id

READ_AT_ONCE = 16  # runs: on a network file system each waits for its files
JUST_SUBMITTED_S = 10.0  # a job may be younger than what the queue says
ALIVE = ("queued", "requeued", "running", "stopping", "unknown")
# A reason in attempts.jsonl, and how a run of which nothing more comes stands after it.
AFTER = {
    "finished": "finished",
    "failed": "failed",
    "hung": "failed",
    "lost": "lost",
    "cancelled": "cancelled",
    "preempted": "stopped",
    "timeout": "stopped",
}


@dataclass(frozen=True)
class RunStatus:
    """How a run stands. `state` is queued, requeued, running, stopping, finished, failed, lost, cancelled, stopped, or
    unknown while Slurm does not answer; `why` says more, e.g. what a queued job waits for. Times are in seconds,
    `goodput` is the share of the allocated time that went into steps which were kept."""

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

    @property
    def alive(self) -> bool:
        """Whether its job waits or runs, or may for all we know."""
        return self.state in ALIVE


class StatusReader:
    """Looks at runs again and again: at their files each time, at the queue, which all users share, now and then."""

    def __init__(self, queue_every_s: float = 10.0) -> None:
        self._every_s = queue_every_s
        self._queue: Queue | None = None

    def look(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """How these runs stand, in their order."""
        if self._queue is None or time.time() > self._queue.at + self._every_s:
            self._queue = Queue.ask(runs)
        return statuses_of(runs, self._queue)


def statuses_of(runs: Sequence[RunDir], queue: Queue) -> list[RunStatus]:
    """How these runs stand, in their order."""
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        return list(pool.map(lambda run: status_of(run, queue), runs))


def status_of(run: RunDir, queue: Queue) -> RunStatus:
    """How one run stands."""
    submissions = read_lines(run.submissions)
    records = records_of(run)
    job_id = _job_of(submissions, records, queue)
    state, why = _state(run, job_id, submissions, records, queue)
    job = (queue.jobs or {}).get(job_id or "")
    lines = last_lines(run.metrics)
    step: AttemptRecord = next((line for line in reversed(lines) if is_step(line)), {})
    done = step.get("step", records[-1]["end_step"] if records else None)
    plan = next(iter(read_lines(run.plan)), {})
    total, batch_size, rate = plan.get("total_steps"), plan.get("batch_size"), step.get("samples_per_s")
    left_s = (total - done) * batch_size / rate if total and done is not None and rate and state == "running" else None
    return RunStatus(
        run=run.name,
        job_id=job_id,
        state=state,
        why=why,
        starts_at=job.starts_at if job and job.state == "PENDING" else None,
        step=done,
        total_steps=total,
        epoch=step.get("epoch"),
        loss=step.get("loss"),
        samples_per_s=rate,
        eta_s=left_s,
        attempts=len(records),
        lost_steps=sum(record["lost_steps"] for record in records),
        goodput=_goodput(records, done, batch_size / rate if batch_size and rate else None),
    )


def records_of(run: RunDir) -> list[AttemptRecord]:
    """Every attempt so far, oldest first; that of one under way has no reason yet."""
    # In the order in which a record moves on when an attempt ends, so that it is not missed on its way.
    left = [record for path in (run.attempt_now, run.attempt_ended) for record in read_lines(path)]
    records = read_lines(run.attempts)
    for record in reversed(left):
        if record["attempt"] not in {entered["attempt"] for entered in records}:
            records.append(record)
    return records


def jobs_of(run: RunDir) -> list[str]:
    """Ids of all jobs that were ever started for the run, oldest first."""
    known = [line["job_id"] for line in (*read_lines(run.submissions), *records_of(run))]
    return list(dict.fromkeys(known))


def _job_of(submissions: Sequence[AttemptRecord], records: Sequence[AttemptRecord], queue: Queue) -> str | None:
    """The job that is in the queue, else the newest."""
    known = [line["job_id"] for line in (*records, *submissions)]
    waiting = [job_id for job_id in known if job_id in (queue.jobs or {})]
    return next(reversed(waiting or known), None)


def _state(
    run: RunDir,
    job_id: str | None,
    submissions: Sequence[AttemptRecord],
    records: Sequence[AttemptRecord],
    queue: Queue,
) -> tuple[str, str]:
    last = records[-1] if records else None
    if last and last["reason"] == "finished":
        return "finished", ""
    if job_id is None:
        return "stopped", "was never submitted"
    if not is_job_id(job_id):
        if at_work := run_lock.current_holder(run.lock):
            return "running", f"on {at_work.rpartition(' on ')[2]}"
        return _afterwards(last if last and last["job_id"] == job_id else None)
    if queue.jobs is None:
        if last and last["job_id"] == job_id and last["reason"] and not last.get("requeue"):
            return _afterwards(last)
        return "unknown", "squeue does not answer"
    if job := queue.jobs.get(job_id):
        return _in_queue(job, came_back=any(record["job_id"] == job_id for record in records))
    if submissions and submissions[-1]["job_id"] == job_id and submissions[-1]["time"] > queue.at - JUST_SUBMITTED_S:
        return "queued", ""
    return _afterwards(last if last and last["job_id"] == job_id else None)


def _in_queue(job: Job, came_back: bool) -> tuple[str, str]:
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        return "requeued" if came_back else "queued", job.reason
    if job.state in ("RUNNING", "CONFIGURING", "SUSPENDED", "RESIZING"):
        return "running", "" if job.state == "RUNNING" else job.state.lower()
    return "stopping", job.state.lower()


def _afterwards(last: AttemptRecord | None) -> tuple[str, str]:
    """The job is gone; `last` is the record of its last attempt."""
    if last is None:
        return "cancelled", "its job left the queue before it began"
    if last["reason"] is None:
        return "lost", "its job is gone and left no word"
    if last.get("requeue"):
        return "cancelled", "its job left the queue before it came back"
    why = (last.get("error") or "").strip().splitlines()
    text = why[-1] if why else {"hung": "a rank was stuck", "timeout": "time limit"}.get(last["reason"], "")
    return AFTER[last["reason"]], text


def _goodput(records: Iterable[AttemptRecord], step: int | None, step_s: float | None) -> float | None:
    """Seconds in steps that were kept over seconds allocated; `step` and `step_s` are those of an attempt under way."""
    allocated = kept = 0.0
    for record in records:
        under_way = record["reason"] is None
        allocated += (time.time() if under_way else record["end"]) - record["start"]
        end_step, mean_s = (step, step_s) if under_way else (record["end_step"], record.get("step_s"))
        kept += max(0, (end_step or 0) - record["lost_steps"] - record["start_step"]) * (mean_s or 0.0)
    return min(1.0, kept / allocated) if allocated > 0 else None

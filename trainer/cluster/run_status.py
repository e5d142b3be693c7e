"""The status of a run: from Slurm's queue, and from the run's own files once its job has left the queue.

Slurm's accounting is not used. Ask the queue before reading the files: a run that ends in between is then found to have
ended. In the other order it would look lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainer.cluster.queue import Job, Queue
from trainer.config.errors import ConfigError
from trainer.records.attempt_record import AttemptRecord, Reason, read_attempts, reason_in
from trainer.records.metrics import newest_step
from trainer.records.plan import read_plan
from trainer.records.submissions import SubmissionRecord, read_submissions
from trainer.rundir import RunDir
from trainer.world import run_lock
from trainer.world.slurm import is_job_id

READ_THREADS = 16  # on a network file system each waits for its run's files
JUST_SUBMITTED_S = 10.0  # a job may be younger than squeue's answer
ALIVE = ("queued", "requeued", "running", "stopping", "unknown")
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

    `state` is queued, requeued, running, stopping, finished, failed, lost, cancelled, stopped, or unknown while Slurm
    does not answer. `why` explains it, e.g. what a queued job is waiting for. Times are in seconds. `goodput` is the
    share of the allocated time that was spent on steps that were kept.
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
    submissions = read_submissions(run.submissions)
    records = records_of(run)
    job_id = _job_of(submissions, records, queue)
    state, why = _state(run, job_id, submissions, records, queue)
    job = (queue.jobs or {}).get(job_id or "")
    step, plan = newest_step(run.metrics), read_plan(run.plan)
    done = step["step"] if step else records[-1]["end_step"] if records else None
    total, batch_size = (plan["total_steps"], plan["batch_size"]) if plan else (None, None)
    rate = step.get("samples_per_s") if step else None
    left_s = None
    if total and batch_size and done is not None and rate and state == "running":
        left_s = (total - done) * batch_size / rate
    return RunStatus(
        run=run.name,
        job_id=job_id,
        state=state,
        why=why,
        starts_at=job.starts_at if job and job.state == "PENDING" else None,
        step=done,
        total_steps=total,
        epoch=step.get("epoch") if step else None,
        loss=step.get("loss") if step else None,
        samples_per_s=rate,
        eta_s=left_s,
        started_at=records[0]["start"] if records else None,
        rank_hours=sum(((r["end"] or time.time()) - r["start"]) * r["world_size"] for r in records) / 3600,
        attempts=len(records),
        lost_steps=sum(record["lost_steps"] for record in records),
        goodput=_goodput(records, done, batch_size / rate if batch_size and rate else None),
    )


def records_of(run: RunDir) -> list[AttemptRecord]:
    """Every attempt so far, oldest first. The record of an attempt under way has no reason yet."""
    # In the order in which a record is moved when an attempt ends, so that it is not missed on its way.
    left = [record for path in (run.attempt_now, run.attempt_ended) for record in read_attempts(path)]
    records = read_attempts(run.attempts)
    for record in reversed(left):
        if record["attempt"] not in {entered["attempt"] for entered in records}:
            records.append(record)
    return records


def jobs_of(run: RunDir) -> list[str]:
    """The ids of all jobs that were ever started for the run, oldest first."""
    known = [line["job_id"] for line in (*read_submissions(run.submissions), *records_of(run))]
    return list(dict.fromkeys(known))


def jobs_in_queue(run: RunDir) -> list[str]:
    """The ids of the run's jobs that wait or run. Raises ConfigError when squeue fails."""
    jobs = [job_id for job_id in jobs_of(run) if is_job_id(job_id)]
    if not jobs:
        return []
    queue = Queue.ask([run])
    if queue.jobs is None:
        raise ConfigError(f"{run.name}: {queue.problem}, so a job of this run may still be alive; try again")
    return [job_id for job_id in jobs if job_id in queue.jobs]


def _job_of(submissions: Sequence[SubmissionRecord], records: Sequence[AttemptRecord], queue: Queue) -> str | None:
    """The newest job that is in the queue, else the newest of all."""
    known = [line["job_id"] for line in (*records, *submissions)]
    in_queue = [job_id for job_id in known if job_id in (queue.jobs or {})]
    return next(reversed(in_queue or known), None)


def _state(
    run: RunDir,
    job_id: str | None,
    submissions: Sequence[SubmissionRecord],
    records: Sequence[AttemptRecord],
    queue: Queue,
) -> tuple[str, str]:
    last = records[-1] if records else None
    if last and last["reason"] == "finished":
        return "finished", ""
    if job_id is None:
        return "stopped", "never submitted"
    if not is_job_id(job_id):
        if at_work := run_lock.current_holder(run.lock):
            return "running", f"on {at_work.rpartition(' on ')[2]}"
        return _without_job(last if last and last["job_id"] == job_id else None)
    if queue.jobs is None:
        if last and last["job_id"] == job_id and last["reason"] and not last["requeue"]:
            return _without_job(last)
        return "unknown", queue.problem
    if job := queue.jobs.get(job_id):
        return _in_queue(job, came_back=any(record["job_id"] == job_id for record in records))
    if submissions and submissions[-1]["job_id"] == job_id and submissions[-1]["time"] > queue.at - JUST_SUBMITTED_S:
        return "queued", ""
    return _without_job(last if last and last["job_id"] == job_id else None)


def _in_queue(job: Job, came_back: bool) -> tuple[str, str]:
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        return "requeued" if came_back else "queued", job.reason
    if job.state in ("RUNNING", "CONFIGURING", "SUSPENDED", "RESIZING"):
        return "running", "" if job.state == "RUNNING" else job.state.lower()
    return "stopping", job.state.lower()


def _without_job(last: AttemptRecord | None) -> tuple[str, str]:
    """State and reason of a run whose job has left the queue; `last` is the record of that job's last attempt."""
    if last is None:
        return "cancelled", "job left the queue before it started"
    if last["reason"] is None:
        return "lost", "job disappeared without recording why"
    if last["requeue"]:
        return "cancelled", "job left the queue before it restarted"
    otherwise = {"hung": "a rank was stuck", "timeout": "time limit"}.get(last["reason"], "")
    return FINAL_STATE[last["reason"]], reason_in(last["error"]) or otherwise


def _goodput(records: Iterable[AttemptRecord], step: int | None, step_s: float | None) -> float | None:
    """Seconds spent on steps that were kept, divided by the seconds allocated.

    `step` (the last one done) and `step_s` (mean seconds per step) belong to the attempt under way.
    """
    allocated = kept = 0.0
    for record in records:
        allocated += (record["end"] if record["reason"] else time.time()) - record["start"]
        end_step, mean_s = (record["end_step"], record["step_s"]) if record["reason"] else (step, step_s)
        kept += max(0, (end_step or 0) - record["lost_steps"] - record["start_step"]) * (mean_s or 0.0)
    return min(1.0, kept / allocated) if allocated > 0 else None

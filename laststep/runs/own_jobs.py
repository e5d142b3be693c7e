"""Which jobs in the queue are a run's own.

An id alone does not say: after a controller lost its state, ids begin anew, and another job gets one that a run has
recorded. A job that Laststep submitted has a tag in its comment, which submissions.jsonl records. A user's own job, or
one whose comment the site has replaced, is known by the time: what was submitted before the run recorded the id is
what the run recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from laststep.records.attempt_record import AttemptRecord
from laststep.records.metrics import read_lines
from laststep.records.submissions import Submission, SubmissionRecord, intents_in, is_unclear, submissions_in
from laststep.rundir import RunDir
from laststep.runs.queue import Job, Queue

CLOCKS_S = 120.0  # by which the clocks of a node and of the controller may differ


class Owner(Enum):
    """Whose job this is."""

    THIS_RUN = auto()
    ANOTHER = auto()
    UNCLEAR = auto()


def owner_of(
    job: Job, job_id: str, uid: int | None, submissions: Sequence[SubmissionRecord], records: Sequence[AttemptRecord]
) -> Owner:
    """Whose job in the queue has this id, which the run has recorded. `uid` is the owner of the run's folder."""
    submitted = [line for line in submissions if line["job_id"] == job_id]
    if job.tag:
        return Owner.THIS_RUN if job.tag in {line.get("tag") for line in submitted} else Owner.ANOTHER
    if uid is not None and job.owner not in (None, uid):
        return Owner.ANOTHER
    attempts = [record for record in records if record["job_id"] == job_id]
    recorded = [line["time"] for line in submitted]
    # Slurm counts a requeue, which follows the end of an attempt, as a submission.
    recorded += [record["end"] if record["reason"] else record["start"] for record in attempts]
    if job.submitted_at <= max(recorded, default=0.0) + CLOCKS_S:
        return Owner.THIS_RUN
    names = {line["job_name"] for line in submitted if "job_name" in line}
    return Owner.ANOTHER if names and job.name not in names else Owner.UNCLEAR


def submissions_of(run: RunDir, queue: Queue) -> tuple[list[SubmissionRecord], list[Submission]]:
    """The run's submissions, also those that sbatch has not answered if the queue shows their job by its tag; and those
    of which it is not known whether Slurm has the job."""
    lines, unclear = read_lines(run.submissions), []
    submissions = submissions_in(lines)
    for intent in intents_in(lines):
        index = intent.get("array_index")
        ids = (
            job_id
            for job_id, job in (queue.jobs or {}).items()
            if job.tag == intent["tag"] and (index is None or job_id.endswith(f"_{index}"))
        )
        if job_id := next(ids, None):
            submissions.append({"job_id": job_id, **intent})  # type: ignore[typeddict-item]
        elif is_unclear(intent):
            unclear.append(intent)
    return submissions, unclear


def owners(
    run: RunDir, queue: Queue, submissions: Sequence[SubmissionRecord], records: Sequence[AttemptRecord]
) -> dict[str, Owner]:
    """Whose the jobs in the queue are that have an id which the run has recorded, the newest of the run last."""
    jobs = queue.jobs or {}
    newest_first = dict.fromkeys(line["job_id"] for line in reversed((*records, *submissions)))
    in_queue = {job_id: jobs[job_id] for job_id in reversed(newest_first) if job_id in jobs}
    uid = run.path.stat().st_uid if in_queue else None
    return {job_id: owner_of(job, job_id, uid, submissions, records) for job_id, job in in_queue.items()}


def why_unclear(job_id: str) -> str:
    """Why nothing is said about a job, and nothing done to it."""
    look = f"squeue --all -o '%j %k %V' -j {job_id}"
    return f"job {job_id} has the id of this run's job but may be another one; look at: {look}"

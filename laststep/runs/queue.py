"""The jobs in Slurm's queue (one squeue for all runs, since every user asks the same controller), and which of them are
a run's own.

An id alone does not say whose a job is: after a controller lost its state, ids begin anew, and another job gets one
that a run has recorded. A job that Laststep submitted has a tag in its comment, which submissions.jsonl records. A
user's own job, or one whose comment the site has replaced, is known by the time: what was submitted before the run
recorded the id is what the run recorded.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import filterfalse

from laststep.ranks import slurm
from laststep.ranks.slurm import NEVER, TAG, SlurmError, check_conf, unix_time
from laststep.records.attempt_record import AttemptRecord
from laststep.records.metrics import read_lines
from laststep.records.submissions import Submission, SubmissionRecord, intents_in, is_unclear, submissions_in
from laststep.rundir import RunDir

NO_ANSWER = "squeue does not answer"
TIMEOUT_S = 30.0  # a busy controller may take that long
# Then the controller is pinged. If that is not answered either, the run's own files must do: a user waits 2 s at most.
PING_AFTER_S, PING_S = 0.7, 0.9
# Job id, state, start time, time of the submission or requeue, owner's uid, name, comment, reason. Names and comments
# may contain any printable character.
FIELDS = ("%i", "%T", "%S", "%V", "%U", "%j", "%k", "%r")
SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Job:
    """A job in the queue, or one of an array: its state as Slurm names it, e.g. PENDING, and why it waits.

    Times are in Unix seconds. The last four fields say whose job it is.
    """

    state: str
    reason: str
    starts_at: float | None  # Slurm's estimate for a job that waits
    submitted_at: float = 0.0  # or requeued
    owner: int | None = None  # uid
    name: str = ""
    tag: str | None = None  # see laststep.ranks.slurm


@dataclass(frozen=True)
class Queue:
    """The jobs in the queue by id (an array's as 12_3); None when Slurm did not answer, and why. `at` is in Unix
    seconds.

    Slurm was not asked for the jobs of `unknown_owners`: uids that this machine does not know.
    """

    at: float
    jobs: dict[str, Job] | None
    problem: str = NO_ANSWER
    unknown_owners: frozenset[int] = frozenset()

    @classmethod
    def ask(cls, runs: Iterable[RunDir]) -> Queue:
        """Ask squeue once, for the jobs of this user and of the owners of these runs; without Slurm there are none."""
        at = time.time()
        owners = {run.path.stat().st_uid for run in runs if run.path.exists()}
        unknown = frozenset(filterfalse(_has_account, owners))
        users = {os.getuid(), *owners} - unknown
        if shutil.which("squeue") is None:
            return cls(at, {}, unknown_owners=unknown)
        of_users, form = f"--user={','.join(map(str, sorted(users)))}", f"--format={SEPARATOR.join(FIELDS)}"
        try:
            check_conf()
        except SlurmError as error:
            return cls(at, None, problem=str(error))
        if (answer := _answer_of(["squeue", "--noheader", "--array", of_users, form])) is None:
            return cls(at, None)
        jobs = (line.split(SEPARATOR) for line in answer.split("\n"))
        return cls(at, dict(_parse(*job) for job in jobs if len(job) == len(FIELDS)), unknown_owners=unknown)


def id_of_tag(tag: str) -> str | None:
    """The id of the job (of an array the id of all of it) with this tag in its comment that this user has in the queue,
    or had there until just now; None if Slurm shows none. Raises SlurmError when it does not answer."""
    words = ("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format=%i{SEPARATOR}%k")
    for line in slurm.command(*words).splitlines():
        job_id, _, comment = line.partition(SEPARATOR)
        if tag in TAG.findall(comment):
            return job_id.strip().partition("_")[0]
    return None


def _answer_of(command: list[str]) -> str | None:
    """What squeue prints; None if it fails or Slurm does not answer."""
    with slurm.start(command) as squeue:
        try:
            try:
                answer, _ = squeue.communicate(timeout=PING_AFTER_S)
            except subprocess.TimeoutExpired:
                if slurm.run(["scontrol", "ping"], PING_S).returncode:
                    return None
                answer, _ = squeue.communicate(timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        finally:
            squeue.kill()
    return None if squeue.returncode or slurm.is_half(answer) else answer


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _parse(
    job_id: str, state: str, starts: str, submitted: str, owner: str, name: str, comment: str, reason: str
) -> tuple[str, Job]:
    starts_at, tags = unix_time(starts), TAG.findall(comment)
    return job_id.strip(), Job(
        state,
        "" if reason == "None" else reason,
        None if starts_at == NEVER else starts_at,
        unix_time(submitted),
        int(owner),
        name,
        tags[-1] if tags else None,
    )


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
    whose job Slurm may or may not have."""
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

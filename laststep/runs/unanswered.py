"""Submissions that sbatch has not answered: whether a run may have a job whose id it does not know.

A command announces each job in submissions.jsonl before it calls sbatch (see laststep.records.submissions). If the
answer is lost, the job is found again by the tag in its comment: by the command itself, by the next one, or by the job,
which knows its own id. As long as nobody knows, nothing is submitted: two jobs would compete for the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from typing import Any, cast

from submitit.core.utils import DelayedSubmission, JobPaths

from laststep.config.config import Config
from laststep.config.errors import ConfigError, Unanswered
from laststep.ranks.launchers import detect_world
from laststep.ranks.process import lives_here
from laststep.ranks.slurm import TAG_VARIABLE, SlurmError
from laststep.records.append_only import append_line
from laststep.records.metrics import read_lines
from laststep.records.submissions import (
    UNCLEAR_S,
    Closed,
    Submission,
    intents_in,
    is_unclear,
    open_intents,
    read_submissions,
    submissions_in,
)
from laststep.rundir import RunDir, aside
from laststep.runs import run_folders
from laststep.runs.queue import id_of_tag
from laststep.say import command
from laststep.trainer import NO_LIMIT, Trainer

LOCK_S = 5.0  # how long to wait for a command on another host that writes a line
POLL_S = 0.05
COMMAND_S = 10.0  # once sbatch has answered, the command writes its files within this time


def announce(run: RunDir, tag: str, known: int, **more: Any) -> Submission:
    """Write down that a job with this tag is about to be submitted. `known`: the number of the run's submissions when
    it was seen that none of them is in the queue.

    Raises ConfigError if another command has been first.
    """
    intent: Submission = {**run_folders.about_submission(run), "tag": tag, **more}  # type: ignore[typeddict-item]
    with _alone(run):
        append_line(run.submissions, json.dumps(intent))
        lines = read_lines(run.submissions)
    first = next((other for other in intents_in(lines) if other["tag"] == tag or is_unclear(other)), intent)
    if first["tag"] != tag:
        close(run, tag, "withdrawn")
        raise ConfigError(_who_is_first(run, first))
    if len(newer := submissions_in(lines)) > known:
        close(run, tag, "withdrawn")
        raise ConfigError(f"{run.name}: another command has just submitted job {newer[-1]['job_id']} of this run")
    return intent


def close(run: RunDir, tag: str, how: Closed) -> None:
    """Write down that there is no job with this tag. If the disk refuses, that is known when the intent expires."""
    with contextlib.suppress(OSError):
        append_line(run.submissions, json.dumps({"tag": tag, "time": time.time(), "closed": how}))


def found(run: RunDir, intent: Submission, job_id: str) -> None:
    """Write down the job of an intent. Raises OSError."""
    append_line(run.submissions, json.dumps({"job_id": job_id, **intent}))


def found_by_itself(run: RunDir, tag: str) -> str | None:
    """The id of the job with this tag, if the job has recorded itself."""
    return next((line["job_id"] for line in read_submissions(run.submissions) if line.get("tag") == tag), None)


def find_jobs(run: RunDir, without_slurm: bool = False) -> None:
    """Find the jobs of open intents, and record them. Raises Unanswered while one may still come into the queue;
    `without_slurm` leaves that be."""
    for intent in open_intents(run.submissions):
        try:
            job_id = id_of_tag(intent["tag"])
        except SlurmError:
            job_id, answers = None, False
        else:
            answers = True
        if job_id:
            found(run, intent, job_id if (index := intent.get("array_index")) is None else f"{job_id}_{index}")
        elif is_unclear(intent):
            if not without_slurm:
                raise Unanswered(_who_is_first(run, intent))
        elif answers:
            close(run, intent["tag"], "expired")


def check_has_no_job(run: RunDir, without_slurm: bool = False) -> int:
    """Check that the run has no job, before it gets another one; returns the number of its submissions, for `announce`.

    Raises ConfigError when it has one, or may have one. `without_slurm`: not where Slurm does not answer.
    """
    from laststep.runs.run_status import jobs_in_queue  # here, because a new run has no use for it

    find_jobs(run, without_slurm)
    known = len(read_submissions(run.submissions))
    if jobs := jobs_in_queue(run, without_slurm):
        cancel = command(f"cancel {run_folders.typed(run)}")
        raise ConfigError(f"{run.name}: job {jobs[0]} of this run is in the queue; end it first: `{cancel}`")
    return known


def _who_is_first(run: RunDir, intent: Submission) -> str:
    process = intent.get("process", "")
    if lives_here(process):
        status = command(f"status {run_folders.typed(run)}")
        return f"{run.name}: another command submits this run just now (pid {process.split()[1]}); see `{status}`"
    return not_known(run, intent)


def not_known(run: RunDir, intent: Submission, why: object = "sbatch has not answered") -> str:
    """That nobody knows whether the run has a job, `why`, and until when."""
    until = time.strftime("%H:%M:%S", time.localtime(intent["time"] + UNCLEAR_S))
    resume = command(f"resume {run_folders.typed(run)}")
    return (
        f"{run.name}: {why}; a job of this run may be in the queue; from {until} on, `{resume}` submits one if Slurm "
        "has none"
    )


def complete_in_job(paths: JobPaths) -> None:
    """In each rank's supervisor: wait until the command that has submitted this job has written submitit's file, which
    says what to run. If sbatch has not answered the command, write the file in its place, and the job's id. Raises
    OSError and ConfigError."""
    run, tag = RunDir(paths.folder.parent), os.environ.get(TAG_VARIABLE)
    deadline = time.monotonic() + COMMAND_S
    while not paths.submitted_pickle.exists():
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    else:
        return
    intents = (line for line in read_lines(run.submissions) if tag is not None and line.get("tag") == tag)
    intent = cast("Submission | None", next(intents, None))
    if intent is None or paths.job_id is None:  # of a sweep, whose runs share the folder
        return
    run_folders.check_trusted(run, [run.submissions])
    config = Config.parse(intent["config"])
    job = DelayedSubmission(Trainer(config))
    job.set_timeout(config.launch.time_min, NO_LIMIT)
    job.dump(temporary := aside(paths.submitted_pickle))
    with contextlib.suppress(FileExistsError):  # the command, or another rank, was first
        os.link(temporary, paths.submitted_pickle)
    temporary.unlink()
    if detect_world().rank == 0:
        found(run, intent, paths.job_id)


@contextlib.contextmanager
def _alone(run: RunDir) -> Iterator[None]:
    """Keep other commands from announcing a job of this run meanwhile: on a network file system two hosts that append
    at the same time may overwrite each other's line. A file system without locks is used without."""
    with run.submissions.open("ab") as file:
        deadline = time.monotonic() + LOCK_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_S)
            except OSError:
                break
        yield

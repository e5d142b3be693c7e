"""cancel: stop runs after their current step, keep every step, and end their jobs."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time

from laststep import say
from laststep.cli.parsers import Parser, add_runs, add_sweep, named_runs
from laststep.ranks import disk
from laststep.ranks.process import is_here, lives_here
from laststep.ranks.slurm import SlurmError, command, is_job_id
from laststep.records.progress import duration
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.run_status import RunStatus, StatusReader, jobs_in_queue, records_of

POLL_S = 1.0
REPEAT_S = 5.0  # a signal is lost if the job's ranks have not started yet
REPORT_S = 15.0
# A job that has no ranks yet, or whose ranks have ended, is cancelled without the care that its ranks need.
STOPPING_S = 60.0
UNSIGNALLED_S = 30.0  # how long `scancel --signal` may fail, before scancel alone is tried

DESCRIPTION = """\
Stop runs after their current step, save it, and end their jobs. A RUN may be a
pattern: 'scan-*'."""


def add_arguments(parser: Parser) -> None:
    """Declare what cancel takes."""
    add_sweep(parser, "all runs of this sweep")
    add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Stop the runs, wait until their jobs have ended, and print the step of each; returns the exit status."""
    runs = named_runs(args)
    try:
        return stop_all(runs, StatusReader(POLL_S))
    except KeyboardInterrupt:
        say.note("\nstill stopping" if len(runs) > 1 else f"\n{runs[0].name}: still stopping")
        return 130


def stop_all(runs: list[RunDir], reader: StatusReader) -> int:
    """Request each stop until its run has ended; returns 1 if one of them cannot be stopped, else 0."""
    failed = 0
    stops: dict[str, _Stop] = {}
    for run, status in zip(runs, reader.read(runs)):
        if status.alive:
            stops[run.name] = _Stop(run)
        else:
            print(f"{run.name}: {status.state}, so there is nothing to cancel")
    while stops:
        for (name, stop), status in zip(list(stops.items()), reader.read([stop.run for stop in stops.values()])):
            try:
                if status.alive:
                    stop.request(status)
                    continue
                say.note(_outcome(stop.run, status), sys.stdout)
            except SlurmError as error:
                say.note(f"error: {name}: not cancelled: {error}")
                failed = 1
            del stops[name]
        time.sleep(POLL_S if stops else 0.0)
    return failed


class _Stop:
    """The stop of one run: what was requested, when, and what was printed about it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._began = time.monotonic()
        self._requested_at = self._reported_at = -REPORT_S
        self._alone = False  # no job of its chain is left behind it
        self._plainly = False  # cancelled without regard for its ranks
        self._ranks_ended_at: float | None = None
        self._unsignalled_since: float | None = None

    def request(self, status: RunStatus) -> None:
        """Request the stop, unless that was done just now, and report what is waited for. Raises SlurmError."""
        now = time.monotonic()
        if now >= self._requested_at + REPEAT_S:
            self._requested_at = now
            self._request(status)
        if now >= self._reported_at + REPORT_S:
            waited = f" after {duration(now - self._began)}" if now >= self._began + REPORT_S else ""
            self._say(f"{'still ' if waited else ''}waiting{waited} for {self._awaited(status)}")
            self._reported_at = now

    def _request(self, status: RunStatus) -> None:
        if status.job_id is None:
            raise SlurmError(status.why)
        if status.job_id.startswith("local-"):
            return _request_local_stop(self.run, status.job_id)
        if not is_job_id(status.job_id):
            raise SlurmError(
                f"not started by {say.program()} ({status.job_id}); stop it with Ctrl-C where it was started"
            )
        if status.state == "unknown":
            raise SlurmError(status.why)
        if not self._alone:
            self._end_chain(status.job_id)
        if status.state == "running" or self._may_train(status):
            self._signal(status)
        elif status.state in ("queued", "requeued", "starting", "restarting"):  # every finished step is on disk
            self._scancel(status)
        elif self._ranks_ended_at is None:
            self._ranks_ended_at = time.monotonic()
        elif time.monotonic() >= self._ranks_ended_at + STOPPING_S:
            self._scancel(status)

    def _end_chain(self, job_id: str) -> None:
        """Cancel the jobs that wait behind this one."""
        in_chain = any("chain" in line for line in read_submissions(self.run.submissions)[-1:])
        if behind := [job for job in jobs_in_queue(self.run) if job != job_id] if in_chain else []:
            command("scancel", *behind)
        self._alone = True

    def _may_train(self, status: RunStatus) -> bool:
        """Whether the ranks may train although `status` shows them as starting: in the job of an attempt that has not
        ended. Usually an earlier start of the job has left its record. So that is believed for STOPPING_S only."""
        last = records_of(self.run)[-1:]
        unended = any(record["job_id"] == status.job_id and not record["reason"] for record in last)
        return status.state == "starting" and unended and time.monotonic() < self._began + STOPPING_S

    def _signal(self, status: RunStatus) -> None:
        """Ask the ranks to stop after their step. If that cannot be done for UNSIGNALLED_S, end the job as it is."""
        assert status.job_id is not None
        try:
            # Unlike scancel's own SIGTERM, this one is not followed by SIGKILL after the cluster's KillWait.
            command("scancel", "--signal=INT", status.job_id)
        except SlurmError as error:
            if "ermission denied" in str(error):
                raise
            since = self._unsignalled_since = self._unsignalled_since or time.monotonic()
            self._say(f"scancel --signal=INT {status.job_id}: {error}; from {UNSIGNALLED_S:.0f} s on, scancel alone")
            if time.monotonic() >= since + UNSIGNALLED_S:
                self._scancel(status)
        else:
            self._unsignalled_since = None

    def _scancel(self, status: RunStatus) -> None:
        assert status.job_id is not None
        if not self._plainly and status.state not in ("queued", "requeued"):
            self._say(f"scancel {status.job_id} ({status.why or status.state})")
        self._plainly = True
        try:
            command("scancel", status.job_id)
        except SlurmError as error:
            if not any(text in str(error) for text in ("Invalid job id", "already completing")):  # it has just ended
                raise

    def _awaited(self, status: RunStatus) -> str:
        job = status.job_id if status.job_id and status.job_id.startswith("local-") else f"job {status.job_id}"
        if status.state != "running":
            return f"{job} to leave the queue ({status.why or status.state})"
        at_once = f"; to end it at once: scancel {status.job_id}" if status.job_id and is_job_id(status.job_id) else ""
        if self.run.progress.exists():
            return f"the command of {job} to end{at_once}"
        return f"the ranks of {job} to finish the current step and save it{at_once}"

    def _say(self, text: str) -> None:
        say.note(f"{self.run.name}: {text}", sys.stdout)


def _request_local_stop(run: RunDir, job_id: str) -> None:
    """Signal the launcher, whose pid is part of the job id. Raises SlurmError when it is elsewhere."""
    submitted = [line for line in read_submissions(run.submissions) if line["job_id"] == job_id]
    launcher = submitted[-1].get("process", "") if submitted else ""  # older versions have not recorded it
    # The ranks may be elsewhere, see laststep.cli.shell: the command that has started them passes the signal on.
    host = submitted[-1].get("host", "") if submitted else (disk.lock_holder(run.lock) or "").rpartition(" on ")[2]
    if host and host != socket.gethostname():
        raise SlurmError(f"it runs with --local on {host}; cancel it there")
    pid = int(job_id.rpartition("-")[2])
    if launcher and not is_here(launcher):
        raise SlurmError("it runs with --local in another container or on another machine; cancel it there")
    if launcher and not lives_here(launcher):  # dead, and its ranks stop by themselves; the pid may be another's
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _outcome(run: RunDir, status: RunStatus) -> str:
    if status.state == "finished":
        return f"{run.name}: finished before it could be cancelled"
    records = records_of(run)
    if not records or records[-1]["job_id"] != status.job_id:
        return f"{run.name}: cancelled before it started"
    step, lost = records[-1]["end_step"], records[-1]["lost_steps"]
    if not step and not run.progress.exists():
        return f"{run.name}: cancelled before its first step"
    kept = f"stopped after step {step}" + (f", {say.counted(lost, 'step')} lost" if lost else ", every step is kept")
    kept = "stopped, and resumes by itself" if run.progress.exists() else kept
    return f"{run.name}: {kept}\nnext   {say.command(f'resume {run_folders.typed(run)}')}"

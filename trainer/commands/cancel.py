"""cancel: stop a run after its current step, keep every step, and end its job."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time

from trainer import say
from trainer.cluster import run_folders
from trainer.cluster.run_status import RunStatus, StatusReader, records_of
from trainer.commands.parsers import Parser, add_run
from trainer.rundir import RunDir
from trainer.world import run_lock
from trainer.world.slurm import SlurmError, command, is_job_id

POLL_S = 1.0
REPEAT_S = 5.0  # a signal is lost if the job's ranks have not started yet

DESCRIPTION = "Stop a run after its current step, save it, and end its job."


def add_arguments(parser: Parser) -> None:
    """Declare what cancel takes."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Stop the run, wait until its job has ended, and print the step; returns the exit status."""
    folder = run_folders.find_run(args.run, run_folders.runs_root(args.overrides))
    reader = StatusReader(POLL_S)
    (status,) = reader.read([folder])
    if not status.alive:
        print(f"{folder.name}: {status.state}, so there is nothing to cancel")
        return 0
    try:
        print(_outcome(folder, _stop_and_wait(folder, status, reader)))
        return 0
    except SlurmError as error:
        print(f"error: {folder.name}: not cancelled: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{folder.name}: still stopping", file=sys.stderr)
        return 130


def _stop_and_wait(run: RunDir, status: RunStatus, reader: StatusReader) -> RunStatus:
    """Request the stop until the run has ended; returns its status then. Raises SlurmError."""
    requested_at = -REPEAT_S
    while status.alive:
        if time.monotonic() >= requested_at + REPEAT_S:
            requested_at = time.monotonic()
            _request_stop(run, status)
        time.sleep(POLL_S)
        (status,) = reader.read([run])
    return status


def _request_stop(run: RunDir, status: RunStatus) -> None:
    """Request the stop once. Raises SlurmError."""
    assert status.job_id is not None
    if status.job_id.startswith("local-"):
        return _request_local_stop(run, status.job_id)
    if not is_job_id(status.job_id):
        raise SlurmError(f"not started by {say.program()} ({status.job_id}); stop it with Ctrl-C where it was started")
    if status.state == "unknown":
        raise SlurmError(status.why)
    if status.state in ("queued", "requeued"):
        command("scancel", status.job_id)
    elif status.state == "running":
        # Unlike scancel's own SIGTERM, this one is not followed by SIGKILL after the cluster's KillWait.
        command("scancel", "--signal=INT", status.job_id)


def _request_local_stop(run: RunDir, job_id: str) -> None:
    """Signal the launcher, whose pid is part of the job id. Raises SlurmError when it is on another host."""
    host = (run_lock.current_holder(run.lock) or "").rpartition(" on ")[2]
    if host and host != socket.gethostname():
        raise SlurmError(f"it runs with --local on {host}; cancel it there")
    with contextlib.suppress(ProcessLookupError):  # the launcher is dead, and its ranks stop by themselves
        os.kill(int(job_id.rpartition("-")[2]), signal.SIGTERM)


def _outcome(run: RunDir, status: RunStatus) -> str:
    if status.state == "finished":
        return f"{run.name}: finished before it could be cancelled"
    records = records_of(run)
    if not records:
        return f"{run.name}: cancelled before it started"
    step, lost = records[-1]["end_step"], records[-1]["lost_steps"]
    kept = f"stopped after step {step}" + (f", {say.counted(lost, 'step')} lost" if lost else ", every step is kept")
    return f"{run.name}: {kept}; to continue: {say.command(f'resume {run.name}')}"

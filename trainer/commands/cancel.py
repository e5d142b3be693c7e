"""cancel: a stop that keeps every step, then the end of the job."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

from trainer.cluster import run_folders
from trainer.cluster.run_status import RunStatus, StatusReader, records_of
from trainer.rundir import RunDir
from trainer.world import run_lock
from trainer.world.slurm import SlurmError, command, is_job_id

POLL_S = 1.0
REPEAT_S = 5.0  # a signal is lost on a job whose ranks are yet to be started


def cancel(name: str, overrides: Sequence[str]) -> int:
    """Stop the run, wait until it has gone, and say where; returns the exit status."""
    run = run_folders.find(name, run_folders.root_of(overrides))
    lookout = StatusReader(POLL_S)
    (now,) = lookout.look([run])
    if not now.alive:
        print(f"{run.name}: {now.state}, so there is nothing to cancel")
        return 0
    try:
        print(_outcome(run, _stopped(run, now, lookout)))
        return 0
    except SlurmError as error:
        print(f"error: {run.name}: not cancelled: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{run.name}: stopping still", file=sys.stderr)
        return 130


def _stopped(run: RunDir, now: RunStatus, lookout: StatusReader) -> RunStatus:
    """Ask for the stop and wait until the run has gone; returns how it stands then. Raises SlurmError."""
    asked_at = -REPEAT_S
    while now.alive:
        if time.monotonic() >= asked_at + REPEAT_S:
            asked_at = time.monotonic()
            _stop(run, now)
        time.sleep(POLL_S)
        (now,) = lookout.look([run])
    return now


def _stop(run: RunDir, now: RunStatus) -> None:
    """Ask for it once. Raises SlurmError."""
    assert now.job_id is not None
    if now.job_id.startswith("local-"):
        return _stop_local(run, now.job_id)
    if not is_job_id(now.job_id):
        raise SlurmError(f"it was not started by launch.py ({now.job_id}); stop it where it was started, by Ctrl-C")
    if now.state == "unknown":
        raise SlurmError(now.why)
    if now.state in ("queued", "requeued"):
        command("scancel", now.job_id)
    elif now.state == "running":
        # Unlike scancel's own SIGTERM, this one is not followed by SIGKILL after the cluster's KillWait.
        command("scancel", "--signal=INT", now.job_id)


def _stop_local(run: RunDir, job_id: str) -> None:
    """Pass it on to the launcher, whose pid is part of the job id. Raises SlurmError when that is elsewhere."""
    host = (run_lock.current_holder(run.lock) or "").rpartition(" on ")[2]
    if host and host != socket.gethostname():
        raise SlurmError(f"it runs under --local on {host}; cancel it there")
    with contextlib.suppress(ProcessLookupError):  # then its ranks stop without it
        os.kill(int(job_id.rpartition("-")[2]), signal.SIGTERM)


def _outcome(run: RunDir, now: RunStatus) -> str:
    if now.state == "finished":
        return f"{run.name}: had finished by then"
    records = records_of(run)
    if not records:
        return f"{run.name}: cancelled before it began"
    step, lost = records[-1]["end_step"], records[-1]["lost_steps"]
    kept = f"stopped after step {step}" + (f", {lost} steps lost" if lost else ", every step is kept")
    return f"{run.name}: {kept}; go on: python launch.py resume {run.name}"

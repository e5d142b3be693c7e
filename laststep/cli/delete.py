"""delete: remove runs for good, after a question; their jobs end first."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from laststep.cli import cancel
from laststep.cli.disk import bytes_in
from laststep.cli.parsers import Parser, add_runs, add_sweep, named_runs
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir, aside
from laststep.runs import run_folders
from laststep.runs.run_status import RunStatus, StatusReader
from laststep.say import counted, note

DESCRIPTION = """\
Remove runs for good: checkpoints, metrics, logs. Asks first, and then cancels
the jobs that they still have. A RUN may be a pattern: 'scan-*'."""
EPILOG = """\
To keep the weights: {program} export RUN OUT.safetensors"""


def add_arguments(parser: Parser) -> None:
    """Declare what delete takes."""
    add_sweep(parser, "all runs of this sweep")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Delete the runs; returns the exit status: 1 if one of them could not be deleted."""
    runs = named_runs(args)
    reader = StatusReader(cancel.POLL_S)
    statuses = reader.read(runs)
    for each, status in zip(runs, statuses):
        _check(each, status)
    for each, status in zip(runs, statuses):
        print(_line(each, status))
    what = f"delete {counted(len(runs), 'run')}"
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{what}: nobody is here to answer; add --yes")
        alive = sum(status.alive for status in statuses)
        jobs = f", and cancel {counted(alive, 'job')}" if alive else ""
        if input(f"{what}{jobs}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing is deleted")
            return 1
    # While the question stood, a run may have been resumed.
    alive_now = [each for each, status in zip(runs, reader.read(runs)) if status.alive]
    if cancel.stop_all(alive_now, reader):
        return 1  # a job that may still write: said, and nothing is deleted
    for each, status in zip(runs, reader.read(runs)):
        _check(each, status)
        if status.alive:
            raise ConfigError(f"{each.name}: has just been started again ({status.state}); nothing is deleted")
    failed = [each for each in runs if not _remove(each)]
    if args.sweep is not None and not failed:
        shutil.rmtree(runs[0].path.parent / args.sweep, ignore_errors=True)  # its code, its logs
    return int(bool(failed))


def _check(run: RunDir, status: RunStatus) -> None:
    """Raise ConfigError for a run that this user may not delete, or that may have a job which nobody can see."""
    if not os.access(run.path.parent, os.W_OK | os.X_OK) or not os.access(run.path, os.W_OK | os.X_OK):
        raise ConfigError(f"{run.name}: you may not write to {run.path}, so you cannot delete it")
    if status.state == "unknown":
        raise ConfigError(f"{run.name}: {status.why}; a job that is left would write into a folder that is gone")


def _line(run: RunDir, status: RunStatus) -> str:
    step = f"step {status.step}, " if status.step else ""
    return f"{run.name}: {status.state}, {step}{bytes_in(run.path) / 1e6:,.1f} MB in {run_folders.short(run.path)}"


def _remove(run: RunDir) -> bool:
    """Remove a run's folder; returns whether nothing is left. It first leaves the folder of all runs in one rename, so
    that no command finds half a run."""
    gone = aside(run.path)
    errors: list[str] = []

    def remember(_: object, path: str, why: Sequence[object]) -> None:
        errors.append(f"{path}: {why[1]}")

    try:
        run.path.rename(gone)
        shutil.rmtree(gone, onerror=remember)
    except OSError as error:
        errors.append(str(error))
    if errors:
        note(f"error: {run.name}: not all of it is deleted: {errors[0]}")
    else:
        print(f"{run.name}: deleted", flush=True)
    return not errors

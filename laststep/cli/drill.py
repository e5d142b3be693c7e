"""drill: preempt a run on purpose, as the scheduler would, and check that it comes back."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

from laststep.cli.parsers import Parser, add_run, named_run
from laststep.config.errors import ConfigError
from laststep.ranks.slurm import SlurmError, is_job_id, scontrol
from laststep.records.attempt_record import AttemptRecord, EndedAttempt
from laststep.records.metrics import StepLine, steps_from
from laststep.rundir import RunDir
from laststep.runs.run_status import StatusReader, records_of
from laststep.say import counted, note

POLL_S = 0.2
T = TypeVar("T")

DESCRIPTION = "Preempt a run as the scheduler would, and print what it cost."


class _JobGone(Exception):
    """The job left the queue during the drill."""


def add_arguments(parser: Parser) -> None:
    """Declare what drill takes."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Preempt the run, wait for its next step, and print what that cost; returns 0 when no step was lost."""
    folder = named_run(args)
    (status,) = StatusReader().read([folder])
    if status.state != "running" or status.job_id is None or not is_job_id(status.job_id):
        raise ConfigError(f"{folder.name}: is {status.state}; a drill needs a run that is running in a Slurm job")
    before = len(records_of(folder))
    began = time.time()
    try:
        # Slurm ends the ranks of a requeued job as it does those of a preempted one: SIGTERM, KillWait, SIGKILL.
        scontrol("requeue", status.job_id)
        print(f"{folder.name}: job {status.job_id} preempted at step {status.step}", flush=True)
        ended = _wait_for(folder, lambda records: _with_end(records[before - 1]))
        _print(f"stopped ({ended['reason']}) after step {ended['end_step']}", ended["end"] - began)
        restarted = _wait_for(folder, lambda records: records[before] if len(records) > before else None)
        _print(f"restarted on {', '.join(restarted['hosts'])}", restarted["start"] - ended["end"])
        since, after = restarted["start"], restarted["start_step"]

        def first_step(_: object) -> StepLine | None:
            return next((line for line in steps_from(folder.metrics, after + 1) if line["time"] >= since), None)

        first = _wait_for(folder, first_step)
        _print(f"did step {first['step']}", first["time"] - restarted["start"])
    except SlurmError as error:
        note(f"error: {folder.name}: {error}")
        return 1
    except _JobGone:
        (status,) = StatusReader().read([folder])
        note(f"error: {folder.name}: did not come back: {status.state}, {status.why}")
        return 1
    except KeyboardInterrupt:
        note(f"\n{folder.name}: continues by itself")
        return 130
    lost = ended["lost_steps"]
    took_s = first["time"] - began
    print(f"{folder.name}: {counted(lost, 'lost step')}, {took_s:.1f} s from the preemption to the next step")
    return int(lost > 0)


def _wait_for(run: RunDir, find: Callable[[list[AttemptRecord]], T | None]) -> T:
    """Wait until `find` returns something from the run's attempts. Raises _JobGone if its job ends before that."""
    reader = StatusReader()
    while not (found := find(records_of(run))):
        time.sleep(POLL_S)
        if not reader.read([run])[0].alive:
            raise _JobGone
    return found


def _with_end(record: AttemptRecord) -> EndedAttempt | None:
    """The record, once the attempt has ended."""
    return record if record["reason"] else None


def _print(event: str, seconds: float) -> None:
    print(f"{seconds:>8.1f} s  {event}", flush=True)

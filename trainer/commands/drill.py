"""drill: preempt a run on purpose, as the scheduler would, and see it come back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from trainer.cluster import run_folders
from trainer.cluster.run_status import StatusReader, records_of
from trainer.config.errors import ConfigError
from trainer.records.attempt_record import AttemptRecord, EndedAttempt
from trainer.records.metrics import first_step_since
from trainer.rundir import RunDir
from trainer.world.slurm import SlurmError, is_job_id, scontrol

POLL_S = 0.2
T = TypeVar("T")


class _Gone(Exception):
    """The job left the queue while it was waited for."""


def drill(name: str, overrides: Sequence[str]) -> int:
    """Preempt the run, wait for its next step, print what that cost; 0 when no step was lost."""
    run = run_folders.find(name, run_folders.root_of(overrides))
    (now,) = StatusReader().look([run])
    if now.state != "running" or now.job_id is None or not is_job_id(now.job_id):
        raise ConfigError(f"{run.name}: is {now.state}; a drill needs a run at work in a Slurm job")
    before = len(records_of(run))
    began = time.time()
    try:
        # Slurm ends the ranks of a requeued job as it does those of a preempted one: SIGTERM, KillWait, SIGKILL.
        scontrol("requeue", now.job_id)
        print(f"{run.name}: job {now.job_id} preempted at step {now.step}", flush=True)
        ended = _until(run, lambda records: _with_end(records[before - 1]))
        _say(f"stopped ({ended['reason']}) after step {ended['end_step']}", ended["end"] - began)
        back = _until(run, lambda records: records[before] if len(records) > before else None)
        _say(f"started again on {', '.join(back['hosts'])}", back["start"] - ended["end"])
        first = _until(run, lambda records: first_step_since(run.metrics, back["start"]))
        _say(f"did step {first['step']}", first["time"] - back["start"])
    except SlurmError as error:
        print(f"error: {run.name}: {error}", file=sys.stderr)
        return 1
    except _Gone:
        (after,) = StatusReader().look([run])
        print(f"error: {run.name}: did not come back: {after.state}, {after.why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{run.name}: goes on by itself", file=sys.stderr)
        return 130
    lost = ended["lost_steps"]
    print(f"{run.name}: {lost} lost steps, {first['time'] - began:.1f} s from the preemption to the next step")
    return int(lost > 0)


def _until(run: RunDir, look: Callable[[list[AttemptRecord]], T | None]) -> T:
    """Wait for what `look` finds in the run's attempts. Raises _Gone when nothing more can come."""
    lookout = StatusReader()
    while not (found := look(records_of(run))):
        time.sleep(POLL_S)
        if not lookout.look([run])[0].alive:
            raise _Gone
    return found


def _with_end(record: AttemptRecord) -> EndedAttempt | None:
    """The record, once the attempt has ended."""
    return record if record["reason"] else None


def _say(what: str, seconds: float) -> None:
    print(f"{seconds:>8.1f} s  {what}", flush=True)

"""A run that has finished: another start of it has nothing to do, and ends before it imports torch.

Slurm 24.11 may start a job once more after its run has finished: the requeue flag of a job that was preempted and
requeued can stay set (docs/design.md). And a user may repeat a command.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.attempt_record import read_ended_attempts
from laststep.records.plan import read_plan
from laststep.rundir import RunDir


class Finish(NamedTuple):
    """The end of a run."""

    step: int
    total_steps: int
    metrics: dict[str, float]  # those of its last epoch


def finish_of(run: RunDir, config: Config) -> Finish | None:
    """The end of the run if it has come to it; None if it has not, if this configuration ends later, or in doubt."""
    ended = read_ended_attempts(run.attempts)
    if not ended or ended[-1]["reason"] != "finished" or run.attempt_now.exists():
        return None
    step, plan = ended[-1]["end_step"], read_plan(run.plan)
    with contextlib.suppress(CheckpointError, ConfigError):
        manifest = CheckpointStore(run.checkpoints).manifest(step)
        trained = Config.parse(manifest.config).train
        if (trained.epochs, trained.max_steps) == (config.train.epochs, config.train.max_steps):
            return Finish(step, plan["total_steps"] if plan else step, manifest.metrics)
    return None

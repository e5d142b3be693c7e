"""Trainer: what a job runs. Picklable by its configuration alone; importing it does not import torch."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

from submitit import JobEnvironment
from submitit.helpers import DelayedSubmission

from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.records.metrics import read_lines
from trainer.records.retry import goes_on, spent
from trainer.rundir import RunDir
from trainer.say import say
from trainer.world.launchers import detect_world
from trainer.world.signals import Signals
from trainer.world.world import World


class Trainer:
    """Trains the run that `config` describes, from its newest checkpoint on: what submitit calls in each rank."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def run(self) -> RunDir:
        """The run's folder."""
        if self.config.launch.name is None:
            raise ConfigError("launch.name=null: a run needs a name")
        return RunDir(Path(self.config.launch.root) / self.config.launch.name)

    def __call__(self) -> dict[str, float]:
        """Train to the end and return the metrics of the last epoch.

        Raises Stopped when a signal ended the attempt before the run was done, SystemExit when it failed and is
        requeued, or whatever made it fail.
        """
        signals = Signals.catch()
        from trainer.attempt.attempt import (
            Attempt,  # not above: the command, which only pickles this class, needs none of it
        )

        world = detect_world()
        if world.rank == 0 and not self.run.config.exists():  # handed to an executor by its user's own program
            self.run.path.mkdir(parents=True, exist_ok=True)
            self.config.save(self.run.config)
        _clear_unfinished(world)
        if world.launcher == "submitit-slurm":
            # srun starts the ranks in the code's copy, so that Python finds that first, see trainer.cluster.sbatch.
            with contextlib.suppress(KeyError, OSError):
                os.chdir(os.environ["SLURM_SUBMIT_DIR"])
        # Importing torch makes a million objects that live as long as the process. The garbage collector would walk
        # over them again and again while they are made, which takes longer than the import (benchmarks/requeue.py).
        gc.disable()
        try:
            return Attempt(self.config, self.run, world, signals).run()
        finally:
            process_ends = world.launcher not in ("python", "submitit-debug")
            # Python would take a second to find at its end what it frees with its memory anyway. But triton's bindings
            # report as leaks what was not found.
            if not process_ends or "triton" in sys.modules:
                gc.unfreeze()
            gc.enable()
            signals.release(process_ends)

    def checkpoint(self) -> DelayedSubmission | None:
        """submitit asks what to run when the job is requeued: the same again. None ends the run instead.

        The state is on disk by now, see `Attempt`.
        """
        if not goes_on(read_lines(self.run.attempts), self.config.launch):
            say(f"not requeued: {spent(self.config.launch)}; `python launch.py resume {self.run.name}` goes on")
            return None
        return DelayedSubmission(Trainer(self.config))


def _clear_unfinished(world: World) -> None:
    """Remove what an attempt before this one could not finish writing, on a full disk say: submitit refuses to write
    beside it, and a run that has finished would end as a failed job."""
    if "SUBMITIT_FOLDER" not in os.environ:  # not one of submitit's own processes
        return
    paths = JobEnvironment().paths
    for path in [paths.result_pickle, *([] if world.rank else [paths.submitted_pickle])]:
        path.with_suffix(f"{path.suffix}.save_tmp").unlink(missing_ok=True)

"""Trainer: what a job runs. Picklable by its configuration alone; importing it does not import torch."""

from __future__ import annotations

import signal
import subprocess
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from submitit.helpers import DelayedSubmission

from trainer.config import Config, ConfigError
from trainer.observe.attempts import AttemptLog, end_attempt, goes_on
from trainer.observe.metrics import read_lines
from trainer.rundir import RunDir
from trainer.state.store import CheckpointStore, Manifest
from trainer.world.detect import World
from trainer.world.lock import hold
from trainer.world.signals import Signals
from trainer.world.slurm import ending

if TYPE_CHECKING:
    from trainer.loop import Loop
    from trainer.world.meet import Group


class Stopped(SystemExit):
    """The ranks stopped after the same step and saved it. Not an Exception, so that nothing takes it for a failure."""

    def __init__(self, number: signal.Signals, world: World) -> None:
        # 128 + number is a shell's exit status for "ended by this signal". But srun takes such a status for a failure
        # and ends the other ranks, and rank 0 may still have to requeue the job.
        super().__init__(0 if world.on_slurm and world.rank else 128 + number)


class Trainer:
    """Trains the run that `config` describes, from its newest checkpoint on: what submitit calls in each rank."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def run(self) -> RunDir:
        """The run's folder."""
        assert self.config.launch.name is not None, "a run is named before it starts"
        return RunDir(Path(self.config.launch.root) / self.config.launch.name)

    def __call__(self) -> dict[str, float]:
        """Train to the end and return the metrics of the last epoch.

        Raises Stopped when a signal ended the attempt before the run was done, or whatever made it fail.
        """
        signals = Signals.catch()
        world = World.detect()
        try:
            return self._attempt(world, signals)
        finally:
            signals.release(process_ends=world.launcher != "python")

    def checkpoint(self) -> DelayedSubmission | None:
        """submitit asks what to run when the job is requeued: the same again. None ends the run instead.

        The state is on disk by now, see `__call__`.
        """
        if not goes_on(read_lines(self.run.attempts), self.config.launch):
            print(
                f"[laststep] not requeued: launch.max_timeouts={self.config.launch.max_timeouts} or "
                f"launch.max_failures={self.config.launch.max_failures} is spent; "
                f"`python launch.py resume {self.run.name}` goes on",
                flush=True,
            )
            return None
        return DelayedSubmission(Trainer(self.config))

    def _attempt(self, world: World, signals: Signals) -> dict[str, float]:
        log: AttemptLog | None = None
        launch = self.config.launch
        newest: Manifest | None = None  # rank 0 looks for all: what the others see of a shared disk may lag
        if world.rank == 0:
            hold(self.run.lock, world)
            store = CheckpointStore(self.run.checkpoints)
            store.recover()
            newest = store.newest(warn=lambda text: print(f"[laststep] {text}", flush=True))
            log = AttemptLog(self.run, world, newest.step if newest else 0)
        group: Group | None = None
        loop: Loop | None = None
        try:
            # Here and not above, so that a signal during the seconds of importing torch is caught too.
            from trainer.loop import Loop, join

            group = join(self.config, self.run, world)
            loop = Loop(self.config, self.run, group, signals)
            loop.restore(group.tell(newest.step if newest else None))
            finished = loop.run()
            loop.part()
        except Exception as error:
            first = group.first_failure(error) if group else traceback.format_exc()
            if log is not None:
                start_step = log.record["start_step"]
                done, kept = (loop.position.step, loop.saved[0]) if loop else (start_step, start_step)
                retry = loop is not None and not isinstance(error, ConfigError)
                record = end_attempt(self.run, world, launch, "failed", done, kept, error=first, retry=retry)
                if record and record["requeue"]:
                    traceback.print_exc()
                    # submitit would take any other exception for the end of the run and write it down as its result.
                    raise SystemExit(1) from error
            raise error
        if finished:
            loop.progress.finished(loop.position.metrics)
            if log is not None:
                step = loop.position.step
                end_attempt(self.run, world, launch, "finished", step, step)
            return loop.position.metrics
        number = loop.stop.signal
        assert number is not None
        if log is not None:
            end = ending(number, world, launch.signal_delay_s)
            end_attempt(self.run, world, launch, end.reason, loop.position.step, loop.position.step, error=end.error)
            if end.requeue and signals.requeue is not None:
                try:
                    signals.requeue()  # submitit's handler: checkpoint(), scontrol requeue, SystemExit
                except (OSError, subprocess.SubprocessError) as error:
                    print(f"[laststep] {error}; the batch shell tries again", flush=True)
        raise Stopped(number, world)

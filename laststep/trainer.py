"""Trainer: what a job runs. It pickles its configuration only, and importing it does not import torch."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import shlex
import sys
from pathlib import Path

from submitit import JobEnvironment
from submitit.helpers import DelayedSubmission

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import COMMAND
from laststep.ranks.launchers import WORKING_FOLDER, detect_world
from laststep.ranks.process import Signals
from laststep.ranks.world import World
from laststep.records import former_names
from laststep.records.attempt_record import read_ended_attempts
from laststep.records.retry import Next, decide, recorded
from laststep.rundir import RunDir
from laststep.say import command, say

# For submitit, which counts timeouts too: launch.max_timeouts is ours.
NO_LIMIT = 1_000_000


class Trainer:
    """Trains the run that `config` describes, from its newest checkpoint on. submitit calls it in each rank."""

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

        A run that has finished is left as it is. Raises Stopped when a signal ended the attempt before the run was
        done, SystemExit when the attempt failed and the job is requeued, else the error that made it fail.
        """
        signals = Signals.catch()
        if not faulthandler.is_enabled():
            with contextlib.suppress(Exception):  # a notebook's stderr is no file
                faulthandler.enable()  # a rank that crashes in C prints its Python stack
        from laststep.attempt.attempt import Attempt  # here, as the command only pickles this class
        from laststep.attempt.command import CommandAttempt
        from laststep.attempt.predecessor import finish_of
        from laststep.checkpoint.files import Patience
        from laststep.checkpoint.store import START_S

        world, patience = detect_world(), Patience(START_S, say)
        # Else a user's program has passed it to an executor.
        if world.rank == 0 and not patience.insist(self.run.config.exists):
            self.run.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.config.save(self.run.config)
        _clear_unfinished(world)
        former_names.resolve_for(self.run)
        if world.launcher == "submitit-slurm":
            _change_to_working_folder()
        # Importing torch creates a million objects that live as long as the process. Meanwhile the garbage collector
        # would walk over them again and again, which takes longer than the import itself (benchmarks/requeue.py).
        gc.disable()
        try:
            if finish := patience.insist(lambda: finish_of(self.run, self.config)):
                say(f"finished at {finish.step} of {finish.total_steps}: nothing is left to do")
                return finish.metrics
            kind = CommandAttempt if self.config.task == COMMAND else Attempt
            return kind(self.config, self.run, world, signals).run()
        finally:
            process_ends = not world.in_users_program
            # At exit Python would spend a second on collecting objects whose memory is freed anyway. But triton's
            # bindings report objects that were not collected as leaks.
            if not process_ends or "triton" in sys.modules:
                gc.unfreeze()
            gc.enable()
            signals.release(process_ends)

    def checkpoint(self) -> DelayedSubmission | None:
        """Returns what the requeued job is to run: the same Trainer. None ends the run instead.

        submitit's signal handler calls this, which `Attempt` runs once the state is saved and the end recorded.
        """
        ended, launch = read_ended_attempts(self.run.attempts), self.config.launch
        # Off Slurm nothing was decided at the end of the attempt, but submitit's LocalExecutor starts its jobs again.
        decision = recorded(ended, launch) if "SLURM_JOB_ID" in os.environ else decide(ended, launch)
        if decision.what is Next.END:
            resume = command(f"resume {shlex.quote(str(self.run.path))}")
            say(f"not requeued: {decision.why}; `{resume}` continues the run")
            return None
        return DelayedSubmission(Trainer(self.config))


def _change_to_working_folder() -> None:
    """Leave the code's copy for the folder that relative paths refer to.

    srun starts the ranks in the copy, so that Python finds it first, see laststep.submission.sbatch. Python has made
    the entries of sys.path absolute already.
    """
    folder = os.environ.get(WORKING_FOLDER)
    try:
        os.chdir(folder or os.environ["SLURM_SUBMIT_DIR"])
    except (KeyError, OSError) as error:
        if folder:
            reason = getattr(error, "strerror", error)
            say(f"WARNING: {folder}: {reason} on this node; relative paths refer to {os.getcwd()} instead")


def _clear_unfinished(world: World) -> None:
    """Remove files of submitit that an earlier attempt could not finish writing, e.g. because the disk was full.

    submitit refuses to overwrite them, so that the job of a finished run would fail.
    """
    if "SUBMITIT_FOLDER" not in os.environ:  # submitit did not start this process
        return
    paths = JobEnvironment().paths
    for path in [paths.result_pickle, *([] if world.rank else [paths.submitted_pickle])]:
        with contextlib.suppress(OSError):  # submitit says what it cannot do
            path.with_suffix(f"{path.suffix}.save_tmp").unlink(missing_ok=True)

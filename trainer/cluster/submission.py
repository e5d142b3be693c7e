"""Handing jobs to Slurm through submitit."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from submitit import Job, SlurmExecutor, SlurmJob
from submitit.core.utils import FailedJobError, FailedSubmissionError

from trainer.cluster import code_copy, machine_checks, run_folders, sbatch
from trainer.cluster.code_origin import origin_of
from trainer.cluster.prepare import Way, prepare_new
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.rundir import RunDir
from trainer.trainer import Trainer
from trainer.world.slurm import new_tag

if TYPE_CHECKING:
    from trainer.cluster.local_job import LocalJob

# Prefixes of the variables that Slurm, submitit, torchrun, mpirun, --spawn and Ray's workers set for their ranks.
LAUNCHER_VARIABLES = (
    *("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_"),
    *("LASTSTEP_RANK", "LASTSTEP_WORLD_SIZE", "LASTSTEP_JOB", "LASTSTEP_WORKING_FOLDER", "LASTSTEP_EXPORTED"),
    *("LASTSTEP_RESTARTS", "LASTSTEP_STEP_RESTARTS", "LASTSTEP_SIGNALLED", "LASTSTEP_RAY_", "LASTSTEP_BATCH_HOST"),
)
# Prefixes of the variables that any launcher may set for torch.
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")
T = TypeVar("T")


@overload
def submit(config: Config, local: Literal[False] = False) -> SlurmJob[dict[str, float]]: ...
@overload
def submit(config: Config, local: Literal[True]) -> LocalJob: ...
@overload
def submit(config: Config, local: bool) -> SlurmJob[dict[str, float]] | LocalJob: ...
def submit(config: Config, local: bool = False) -> SlurmJob[dict[str, float]] | LocalJob:
    """Start a new run from Python: submit it to Slurm or, with `local`, train it on this machine in the background.

    Returns a job whose `result()` waits for the final metrics: on Slurm, submitit's Job of rank 0. Raises ConfigError
    when the configuration cannot work here, or Slurm refuses it; then nothing is left behind.
    """
    config = prepare_new(config, Way.LOCAL if local else Way.SLURM)
    with run_folders.created(config) as run:
        if not local:
            return submit_run(config, run)
        from trainer.cluster.local_job import LocalJob  # here, because it would slow down every submission

        return LocalJob(config, run)


def submit_run(config: Config, run: RunDir) -> SlurmJob[dict[str, float]]:
    """Submit a job for a run whose folder exists. Raises ConfigError when Slurm refuses it.

    The first job of a run copies the code; later jobs of the run use the same copy.
    """
    with _ended_by_signals():
        if not run.code.exists():
            code_copy.copy_code(run, config)
        tag = new_tag()
        (job,) = submit_jobs(sbatch.run_executor(config, run, tag), [Trainer(config)])
        run_folders.record_submission(run, job.job_id, commit=origin_of(run, config).commit, job_name=run.name, tag=tag)
    return job.task(0)  # type: ignore[return-value]


def submit_array(config: Config, sweep: RunDir, configs: Sequence[Config], parallel: int | None, tag: str) -> list[str]:
    """Submit runs as one array, of which at most `parallel` run at a time; returns their job ids.

    `config` says what resources each job asks for; `tag` is for their comment. Raises ConfigError when Slurm refuses
    the array.
    """
    executor = sbatch.run_executor(config, sweep, tag)
    executor.update_parameters(array_parallelism=parallel or len(configs))
    return [job.job_id for job in submit_jobs(executor, [Trainer(one) for one in configs])]


def submit_jobs(executor: SlurmExecutor, functions: Sequence[Callable[[], T]]) -> Sequence[Job[T]]:
    """Submit one job per function, several as one array. Raises ConfigError when Slurm refuses them."""
    try:
        # submitit repeats sbatch's message on stderr; the ConfigError has it already.
        with _without_launcher_variables(), contextlib.redirect_stderr(io.StringIO()):
            return executor.submit_array(functions)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        reason = _sbatch_message(error)
        if any(text in reason for text in ("Unable to contact", "configuration source")):
            last = reason.rpartition("; ")[2].removeprefix("sbatch: fatal: ")
            raise ConfigError(f"no Slurm answers here ({last}): {machine_checks.WITHOUT_SLURM}") from None
        raise ConfigError(f"Slurm refused the job: {reason}") from None


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and a closed terminal raise SystemExit instead of ending the process, so that a submission during
    which Slurm is silent leaves nothing behind. Only in the main thread."""
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt  # for any other exception, subprocess would wait for sbatch to end

    main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _without_launcher_variables() -> Iterator[None]:
    """Hide the variables of a surrounding launcher: sbatch would read them as options and pass them on to the job,
    whose ranks would take themselves for ranks of that launcher. SLURM_CONF, which names the Slurm to talk to, and the
    user's SBATCH_* stay; so do MASTER_ADDR and MASTER_PORT, unless a RANK is set too."""
    prefixes = (*LAUNCHER_VARIABLES, *(TORCH_VARIABLES if "RANK" in os.environ else ()))
    hidden = {k: v for k, v in os.environ.items() if k.startswith(prefixes) and k != "SLURM_CONF"}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _sbatch_message(error: Exception) -> str:
    """sbatch's error messages, on one line."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in str(error).splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__

"""Handing jobs to Slurm through submitit."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from submitit import Job, SlurmExecutor, SlurmJob
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError

from laststep.code import code_copy
from laststep.code.code_copy import origin_of
from laststep.config.config import Config
from laststep.config.errors import ConfigError, Unanswered
from laststep.ranks.process import kill_children
from laststep.ranks.slurm import SlurmError, new_tag
from laststep.records.submissions import Submission, read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_folders, unanswered
from laststep.runs.queue import id_of_tag
from laststep.submission import machine_checks, sbatch
from laststep.submission.prepare import Way, prepare_new
from laststep.trainer import Trainer

if TYPE_CHECKING:
    from laststep.submission.local import LocalJob

# Prefixes of the variables that Slurm, submitit, torchrun, mpirun, --spawn and Ray's workers set for their ranks.
LAUNCHER_VARIABLES = (
    *("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_"),
    *("LASTSTEP_RANK", "LASTSTEP_WORLD_SIZE", "LASTSTEP_JOB", "LASTSTEP_WORKING_FOLDER", "LASTSTEP_EXPORTED"),
    *("LASTSTEP_RESTARTS", "LASTSTEP_STEP_RESTARTS", "LASTSTEP_SIGNALLED", "LASTSTEP_RAY_", "LASTSTEP_BATCH_HOST"),
)
# Prefixes of the variables that any launcher may set for torch.
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")
# sbatch waits at most for MessageTimeout (100 s) for one answer. One that runs longer hangs.
SBATCH_S = 120.0
# How long a job is looked for that Slurm may have taken; then the next command does that.
LOOK_S, POLL_S = 20.0, 1.0
# What sbatch says when the request may have arrived although it has no answer (slurm_errno.c), or nothing.
UNCLEAR = re.compile(r"timed out|zero bytes|unexpected message|protocol|(send|receive) failure|connection|^$", re.I)
PICKLES = "[0-9a-f]" * 32 + ".pkl"  # submitit's, until it knows the job's id
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
        from laststep.submission.local import LocalJob  # here, because it would slow down every submission

        return LocalJob(config, run)


def submit_run(config: Config, run: RunDir, known: int = 0) -> SlurmJob[dict[str, float]]:
    """Submit a job for a run whose folder exists. `known`: the number of its submissions when none of them was in the
    queue. Raises ConfigError when Slurm refuses the job, or another command is first; Unanswered when nobody knows.

    The first job of a run copies the code; later jobs of the run use the same copy.
    """
    with _ended_by_signals():
        if not run.code.exists():
            code_copy.copy_code(run, config)
        tag = new_tag()
        intent = unanswered.announce(run, tag, known, commit=origin_of(run, config).commit, job_name=run.name)
        try:
            (job,) = submit_trainers(sbatch.run_executor(config, run, tag), [Trainer(config)], tag)
        except _NoAnswer as error:
            job_id = unanswered.found_by_itself(run, tag)  # it may have ended since
            if job_id is None:
                raise Unanswered(unanswered.not_known(run, intent, error)) from None
            job = SlurmJob(folder=run.logs, job_id=job_id, tasks=(0,))
        except (ConfigError, OSError):
            unanswered.close(run, tag, "refused")
            raise
        else:
            _record([(run, intent)], [job])
    return job.task(0)  # type: ignore[return-value]


def submit_array(
    config: Config, sweep: RunDir, runs: Sequence[RunDir], configs: Sequence[Config], parallel: int | None
) -> list[str]:
    """Submit runs as one array, of which at most `parallel` run at a time; returns their job ids, and records them.

    `config` says what resources each job asks for. Raises ConfigError when Slurm refuses the array, or another command
    submits one of the runs; Unanswered when nobody knows whether Slurm has it.
    """
    tag, commit = new_tag(), origin_of(sweep, config).commit
    executor = sbatch.run_executor(config, sweep, tag)
    executor.update_parameters(array_parallelism=parallel or len(configs))
    intents: list[tuple[RunDir, Submission]] = []
    with _ended_by_signals():
        try:
            for index, run in enumerate(runs):
                known = len(read_submissions(run.submissions))
                more: dict[str, Any] = {"commit": commit, "job_name": sweep.name}
                if len(runs) > 1:
                    more["array_index"] = index
                intents.append((run, unanswered.announce(run, tag, known, **more)))
            jobs = submit_trainers(executor, [Trainer(one) for one in configs], tag)
        except _NoAnswer as error:
            raise Unanswered(unanswered.not_known(*intents[0], error)) from None
        except (ConfigError, OSError):
            for run, _ in intents:
                unanswered.close(run, tag, "refused")
            raise
        _record(intents, jobs)
    return [job.job_id for job in jobs]


def _record(intents: Iterable[tuple[RunDir, Submission]], jobs: Iterable[Job[Any]]) -> None:
    """Record the jobs' ids. If the disk refuses, the jobs find themselves by their tags."""
    for (run, intent), job in zip(intents, jobs):
        try:
            unanswered.found(run, intent, job.job_id)
        except OSError as error:
            raise Unanswered(f"{run.name}: submitted as job {job.job_id}, but {error}") from None


def submit_trainers(executor: SlurmExecutor, trainers: Sequence[Trainer], tag: str) -> Sequence[Job[dict[str, float]]]:
    """Submit one job per Trainer, several as one array, with this tag in their comment. If sbatch fails although Slurm
    has taken them, they are found by their tag. Raises ConfigError when Slurm refuses them, _NoAnswer when it is not
    known whether it has them."""
    logs = Path(executor.folder)
    before = set(logs.glob(PICKLES))
    try:
        return submit_jobs(executor, trainers)
    except (ConfigError, OSError) as error:  # submitit may have failed to write a file after sbatch's answer
        job_id = _look_for(tag, LOOK_S if isinstance(error, _NoAnswer) else 0.0)
        if job_id is None:
            raise
    return _taken(logs, job_id, trainers, tag, set(logs.glob(PICKLES)) - before)


def _look_for(tag: str, patience_s: float) -> str | None:
    """The id of the job with this tag. A controller that was too busy to answer sbatch may show it only later."""
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(SlurmError):
            if job_id := id_of_tag(tag):
                return job_id
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_S)


def _taken(
    logs: Path, job_id: str, trainers: Sequence[Trainer], tag: str, pickles: Iterable[Path]
) -> list[Job[dict[str, float]]]:
    """The jobs that Slurm has taken without saying so. submitit names their files once it knows their ids. A file that
    cannot be named now is written by the job itself."""
    ids = [job_id] if len(trainers) == 1 else [f"{job_id}_{index}" for index in range(len(trainers))]
    jobs: list[Job[dict[str, float]]] = [SlurmJob(folder=logs, job_id=one, tasks=(0,)) for one in ids]
    job_of = {trainer.config.launch.name: job for trainer, job in zip(trainers, jobs)}
    with contextlib.suppress(OSError):
        for pickle in pickles:
            trainer = cast(Trainer, DelayedSubmission.load(pickle).function)
            if job := job_of.get(trainer.config.launch.name):
                job.paths.move_temporary_file(pickle, "submitted_pickle")
        for script in logs.glob(".submission_file_*.sh"):
            if not script.is_symlink() and tag in script.read_text():
                jobs[0].paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
    return jobs


def submit_jobs(executor: SlurmExecutor, functions: Sequence[Callable[[], T]]) -> Sequence[Job[T]]:
    """Submit one job per function, several as one array. Raises ConfigError when Slurm refuses them, or does not say
    whether it has taken them."""
    try:
        # submitit repeats sbatch's message on stderr; the ConfigError has it already.
        with _without_launcher_variables(), contextlib.redirect_stderr(io.StringIO()), _within(SBATCH_S):
            return executor.submit_array(functions)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        reason = _sbatch_message(error)
        if any(text in reason for text in ("connect failure", "configuration source")):
            last = reason.rpartition("; ")[2].removeprefix("sbatch: fatal: ")
            raise ConfigError(f"no Slurm answers here ({last}): {machine_checks.WITHOUT_SLURM}") from None
        if isinstance(error, FailedSubmissionError) or UNCLEAR.search(str(error).strip()):
            raise _NoAnswer(f"sbatch has not answered ({reason})") from None
        raise ConfigError(f"Slurm refused the job: {reason}") from None


class _NoAnswer(ConfigError):
    """sbatch has failed without saying that Slurm has refused the job."""


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Kill sbatch if it runs longer: then it fails. Also if this is interrupted: nobody waits for it any more."""
    timer = threading.Timer(seconds, kill_children, ["sbatch"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        kill_children("sbatch")
        raise
    finally:
        timer.cancel()


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
    whose ranks would mistake themselves for that launcher's ranks. SLURM_CONF, which names the Slurm to talk to, and
    the user's SBATCH_* stay; so do MASTER_ADDR and MASTER_PORT, unless a RANK is set too."""
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

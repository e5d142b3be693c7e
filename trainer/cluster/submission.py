"""Submitting a run to Slurm through submitit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from submitit import Job, SlurmExecutor, SlurmJob
from submitit.core.utils import FailedJobError, FailedSubmissionError

from trainer import compat
from trainer.cluster import code_copy, machine_checks, run_folders
from trainer.cluster.queue import Queue
from trainer.cluster.run_status import jobs_of
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.config.schema import Launch
from trainer.rundir import RunDir
from trainer.trainer import Trainer
from trainer.world.slurm import is_job_id, kill_wait_s

# How often a run is requeued is decided by Trainer.checkpoint: submitit would count every signal within ten minutes
# of the limit as a timeout.
NO_LIMIT = 1_000_000
# How the variables begin that Slurm, submitit, torchrun, mpirun and --spawn set for their ranks; and those for torch.
LEAKS = (
    *("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_"),
    *("LASTSTEP_RANK", "LASTSTEP_WORLD_SIZE", "LASTSTEP_JOB"),
)
TORCH_LEAKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_")
T = TypeVar("T")


class _Executor(SlurmExecutor):
    """submitit's, but one that can be made, to show its script, where there is no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self) -> str:
        """The sbatch script that a submission would hand over."""
        return compat.sbatch_script(self)


def submit(config: Config) -> SlurmJob[dict[str, float]]:
    """Submit a run; returns submitit's Job of rank 0, whose `result()` is the final metrics.

    Raises ConfigError when the configuration cannot work here, or Slurm refuses it: then nothing was left behind.
    """
    config = with_grace(run_folders.with_name(config, stem="run"))
    machine_checks.check_names(config)
    machine_checks.check_submission(config)
    machine_checks.check_slurm()
    run = run_folders.create(config)
    try:
        return submit_run(config, run)
    except ConfigError:
        run_folders.remove(run)
        raise


def with_grace(config: Config) -> Config:
    """The configuration with the grace that this cluster gives a job, where none is given and Slurm answers."""
    if config.launch.grace_s is not None:
        return config
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, grace_s=kill_wait_s()))


def submit_run(config: Config, run: RunDir) -> SlurmJob[dict[str, float]]:
    """Submit a job for a run whose folder exists. Raises ConfigError when Slurm refuses it.

    The first job of a run takes the code along; those that go on with it run the same.
    """
    if not run.code.exists():
        code_copy.keep(run, config)
    (job,) = hand_over(make_executor(config, run), [Trainer(config)])
    run_folders.note_submission(run, job.job_id, commit=code_copy.commit())
    return job.task(0)  # type: ignore[return-value]


def submit_array(config: Config, sweep: RunDir, configs: Sequence[Config], parallel: int | None) -> list[str]:
    """Submit runs as one array, as many at a time as `parallel` says; returns their job ids.

    `config` says what all jobs ask for. Raises ConfigError when Slurm refuses it.
    """
    executor = make_executor(config, sweep)
    executor.update_parameters(array_parallelism=parallel or len(configs))
    return [job.job_id for job in hand_over(executor, [Trainer(one) for one in configs])]


def hand_over(executor: SlurmExecutor, works: Sequence[Callable[[], T]]) -> Sequence[Job[T]]:
    """Submit jobs, several as one array. Raises ConfigError when Slurm refuses them."""
    try:
        # submitit repeats sbatch's words on stderr; we say them once, below.
        with _outside_any_job(), contextlib.redirect_stderr(io.StringIO()):
            return executor.submit_array(works)
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        reason = _reason(error)
        if any(words in reason for words in ("Unable to contact", "configuration source")):
            last = reason.rpartition("; ")[2].removeprefix("sbatch: fatal: ")
            raise ConfigError(f"no Slurm answers here ({last}): {machine_checks.WITHOUT_SLURM}") from None
        raise ConfigError(f"Slurm refused the job: {reason}") from None


def make_executor(config: Config, run: RunDir) -> _Executor:
    """submitit's executor with everything that `launch` says, for a run."""
    # A rank that fails ends the others, whatever they wait for; at a stop every rank but 0 exits 0, see Stopped.
    return executor_of(config.launch, run, _afterwards(run), ["--kill-on-bad-exit=1"], {"requeue": True})


def executor_of(
    launch: Launch, run: RunDir, setup: Sequence[str], srun_args: Sequence[str], options: Mapping[str, Any]
) -> _Executor:
    """submitit's executor for any job that runs the code in `run.code`."""
    executor = _Executor(folder=run.logs, max_num_timeout=NO_LIMIT, python=launch.python)
    each, ranged = launch.ranks_per_node, len(launch.node_counts) > 1
    if ranged:
        # Told of --ntasks-per-node, Slurm 22.05 would never start it on fewer nodes again, see docs/design.md. So the
        # job asks for the CPUs of that many ranks, and its shell tells srun of them.
        options = {**options, "nodes": launch.nodes, "mincpus": each * launch.cpus_per_task}
        setup = [*setup, f"export SLURM_NTASKS_PER_NODE={each} SLURM_NTASKS=$(({each} * SLURM_JOB_NUM_NODES))"]
    optional: dict[str, Any] = {
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "constraint": launch.constraint,
        "exclude": launch.exclude,
        "ntasks_per_node": None if ranged else each,
        "gpus_per_node": launch.gpus_per_node or None,
        "mem": None if launch.mem_gb is None else f"{max(1, round(1024 * launch.mem_gb))}MB",
    }
    executor.update_parameters(
        job_name=run.name,
        nodes=launch.node_counts[0],
        cpus_per_task=launch.cpus_per_task,
        time=launch.time_min,
        signal_delay_s=launch.signal_delay_s,
        setup=[*setup, *_environment(launch, run.code), *launch.setup, *_elsewhere(launch)],
        # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task (man srun). `python -m` looks into the
        # folder that it is started in first, see Trainer.
        srun_args=[f"--cpus-per-task={launch.cpus_per_task}", *srun_args, f"--chdir={run.code}", *launch.srun],
        stderr_to_stdout=True,
        additional_parameters={**options, **launch.slurm},
        **{key: value for key, value in optional.items() if value is not None},
    )
    return executor


def living_jobs(run: RunDir) -> list[str]:
    """Jobs of the run that wait or run. Raises ConfigError when squeue fails."""
    jobs = [job_id for job_id in jobs_of(run) if is_job_id(job_id)]
    if not jobs:
        return []
    queue = Queue.ask([run])
    if queue.jobs is None:
        raise ConfigError(f"{run.name}: cannot tell whether a job of it is alive, as squeue does not answer; try again")
    return [job_id for job_id in jobs if job_id in queue.jobs]


def _environment(launch: Launch, code: Path) -> list[str]:
    """Shell lines that set the ranks' environment."""
    environment = {
        "OMP_NUM_THREADS": str(launch.cpus_per_task),
        "PYTHONPATH": run_folders.python_path(code),
        **launch.env,
    }
    return [f"export {name}={_quote(value)}" for name, value in environment.items()]


def _elsewhere(launch: Launch) -> list[str]:
    """Shell lines that run those of `launch.setup` on the nodes where this shell is not; what they set in the
    environment here goes to all ranks anyway."""
    if launch.node_counts[-1] == 1 or not launch.setup:
        return []
    lines = shlex.quote("\n".join(launch.setup))
    return [
        "others=$((SLURM_JOB_NUM_NODES - 1))",
        "[ $others = 0 ] || srun --relative=1 --nodes=$others --ntasks=$others --ntasks-per-node=1 --cpus-per-task=1"
        f" bash -c {lines}",
    ]


def _afterwards(run: RunDir) -> list[str]:
    """Shell lines that look after the run once all its ranks have ended: outside any image, where Slurm's commands are,
    and so with the Python that submits."""
    python, folder, copy = (shlex.quote(str(word)) for word in (sys.executable, run.path, run.code))
    return [
        "# This shell outlives all ranks: when they have failed, or are dead, it finds out whether to requeue the job.",
        "afterwards() {",
        "    status=$?",
        "    trap '' TERM USR1 USR2",
        "    [ $status = 0 ] && return",
        f"    cd {copy}",
        f"    timeout -s KILL 300 {python} -m trainer.cluster.after_ranks {folder} $status",
        "}",
        "trap afterwards EXIT",
        "trap : TERM USR1 USR2",
    ]


def _quote(value: str) -> str:
    """Quote for the shell, but let it expand variables such as $HOME."""
    return '"' + re.sub(r'([\\"`])', r"\\\1", value) + '"'


@contextlib.contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide what a surrounding launcher left in the environment: sbatch would take it for options, and hand it on to
    the job, whose ranks would take themselves for those of that launcher. SLURM_CONF, which says which Slurm to talk
    to, and the user's own SBATCH_* stay; so do MASTER_ADDR and MASTER_PORT, unless they came with a RANK."""
    leaks = [*LEAKS, *(TORCH_LEAKS if "RANK" in os.environ else ())]
    hidden = {k: v for k, v in os.environ.items() if k.startswith(tuple(leaks)) and k != "SLURM_CONF"}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _reason(error: Exception) -> str:
    """What sbatch says is wrong, on one line."""
    lines = [line.removeprefix("sbatch: error: ").strip() for line in str(error).splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__

"""The sbatch script of a job: submitit's executor, with everything that `launch` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor

from laststep import compat
from laststep.config.checks import nodes_for
from laststep.config.config import Config
from laststep.job import nodes
from laststep.ranks.slurm import TAG_VARIABLE
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.submission import batch_shell
from laststep.trainer import NO_LIMIT

# Trainer.checkpoint decides how often a run is requeued. submitit's own limit would count every signal within ten
# minutes of the time limit as a timeout.


class SbatchExecutor(SlurmExecutor):
    """submitit's executor, which can also be created on a machine without Slurm, to show its script."""

    @classmethod
    def affinity(cls) -> int:
        """Claim that Slurm is available, also on a machine without it."""
        return 2

    def script(self) -> str:
        """The sbatch script that would be submitted."""
        return compat.sbatch_script(self)


def run_executor(config: Config, run: RunDir, tag: str = "") -> SbatchExecutor:
    """The executor for the ranks of a run. `tag` is for the job's comment, by which the run knows its job."""
    # A rank that fails ends the others, even if they are stuck; at a stop every rank but 0 exits 0, see Stopped.
    srun_args, options = ["--kill-on-bad-exit=1"], {"requeue": True}
    if config.launch.chooses_nodes:
        options["no-kill"] = True  # a node that dies does not end the job
    first, last = batch_shell.after_ranks(run, config.launch), batch_shell.start_again(run, config.launch)
    executor = job_executor(config, run, first, srun_args, options, tag, last)
    executor.python += " -u -m laststep.job.supervisor"  # which starts the rank
    if exclude := nodes.excluded_at_submission(run, config.launch):
        executor.update_parameters(exclude=exclude)
    return executor


def job_executor(
    config: Config,
    run: RunDir,
    setup: Sequence[str],
    srun_args: Sequence[str],
    options: Mapping[str, Any],
    tag: str = "",
    last: Sequence[str] = (),
) -> SbatchExecutor:
    """The executor for any job that runs the code in `run.code`.

    `setup` holds the first lines of its batch shell, `last` the last ones before srun, `options` further options of
    sbatch.
    """
    launch = config.launch
    executor = SbatchExecutor(folder=run.logs, max_num_timeout=NO_LIMIT, python=launch.python)
    if launch.chooses_nodes:
        # With --ntasks-per-node, Slurm 22.05 would never start the job on fewer nodes again, see docs/design.md. So
        # the job asks for the CPUs of that many ranks, and its shell passes the number of ranks to srun.
        options = {**options, "nodes": launch.job_nodes, "mincpus": launch.ranks_per_node * launch.cpus_per_task}
        setup = [*setup, *batch_shell.rank_count(launch, nodes_for(config.train.shares, launch))]
    folder = run_folders.working_folder(run)
    if folder != Path.cwd():  # a run that is resumed from elsewhere
        options = {**options, "chdir": folder}
    slurm = {option: value for option, value in launch.slurm.items() if value is not None}
    if tag:
        slurm["comment"] = f"{slurm.get('comment') or ''} {tag}".strip()
        setup = [*setup, f"export {TAG_VARIABLE}={tag}"]
    optional: dict[str, Any] = {
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "constraint": launch.constraint,
        "exclude": launch.exclude,
        "ntasks_per_node": None if launch.chooses_nodes else launch.ranks_per_node,
        # Slurm would add up what two options ask for.
        "gpus_per_node": None if launch.gpus_in_slurm else launch.gpus_per_node or None,
        "mem": None if launch.mem_gb is None else f"{max(1, round(1024 * launch.mem_gb))}MB",
    }
    executor.update_parameters(
        job_name=run.name,
        nodes=launch.node_counts[0],
        cpus_per_task=launch.cpus_per_task,
        time=launch.time_min,
        signal_delay_s=launch.signal_delay_s,
        setup=[*setup, *batch_shell.environment(config, run), *batch_shell.user_setup(launch), *last],
        # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task (man srun). --chdir: `python -m` searches
        # the current folder first, see Trainer.
        srun_args=[f"--cpus-per-task={launch.cpus_per_task}", *srun_args, f"--chdir={run.code}", *launch.srun],
        stderr_to_stdout=True,
        additional_parameters={**options, **slurm},
        **{key: value for key, value in optional.items() if value is not None},
    )
    return executor

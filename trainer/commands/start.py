"""Starting a prepared run in one of five ways: what submit and resume share."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.cluster import follow, local, sbatch, submission
from trainer.cluster.prepare import Way
from trainer.cluster.run_status import records_of
from trainer.config.config import Config
from trainer.config.schema import Launch
from trainer.rundir import RunDir
from trainer.say import command, counted


def start(config: Config, run: RunDir, way: Way) -> int:
    """Start the ranks of a run whose folder exists; returns the exit status. Raises ConfigError when Slurm refuses."""
    launch = config.launch
    if way is Way.DEBUG:
        return local.run_debug(config)
    if way is Way.LOCAL:
        print(f"run    {run.name}\nranks  {launch.world_size} on this machine\nfolder {_short(run.path)}", flush=True)
        status = local.run_local(config, run)
        # Without a reason, nothing was saved: a second Ctrl-C has killed the ranks.
        if status > 128 and any(record["reason"] for record in records_of(run)[-1:]):
            resume = command(f"resume {run.name} --local{root_hint(launch)}")
            print(f"[laststep] stopped and saved; to continue: {resume}")
        return status
    job = submission.submit_run(config, run)
    print(f"run    {run.name}")
    print(f"job    {job.job_id}: {counted(launch.nodes, 'node')} x {counted(launch.ranks_per_node, 'rank')}")
    print(f"folder {_short(run.path)}")
    print(f"log    {_short(job.paths.stdout)} (rank 0)")
    for verb in ("logs -f", "status", "cancel"):
        print(f"next   {command(f'{verb} {run.name}{root_hint(launch)}')}", flush=True)
    return follow.follow(run, job) if way is Way.FOLLOW else 0


def dry_run(config: Config) -> int:
    """Print the configuration and the sbatch script; returns the exit status."""
    run = RunDir(Path(config.launch.root) / str(config.launch.name))
    print(f"# {_short(run.config)}\n{config.to_yaml()}")
    print(f"# sbatch script\n{sbatch.run_executor(config, run).script()}")
    return 0


def root_hint(launch: Launch) -> str:
    """What a command must add to a run's name to find it: nothing, or ` launch.root=...`."""
    default = os.path.abspath(Launch().root)
    return "" if launch.root == default else f" launch.root={launch.root}"


def _short(path: os.PathLike[str]) -> str:
    """Relative to the current folder, where that is shorter."""
    return min(os.fspath(path), os.path.relpath(path), key=len)

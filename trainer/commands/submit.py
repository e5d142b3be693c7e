"""submit and resume: start a run, or go on with one, in one of five ways."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.cluster import follow, local, machine_checks, run_folders, submission
from trainer.cluster.run_status import records_of
from trainer.config.config import Config, find_config
from trainer.config.errors import ConfigError
from trainer.config.schema import Launch
from trainer.rundir import RunDir


class Way(enum.Enum):
    """Where the ranks run, and whether the command stays."""

    SLURM = "submit"
    FOLLOW = "follow"
    LOCAL = "local"
    DEBUG = "debug"
    DRY_RUN = "dry_run"

    @classmethod
    def of(cls, given: argparse.Namespace) -> Way:
        """The way that the options ask for."""
        return next((way for way in cls if getattr(given, way.value, False)), cls.SLURM)


def submit(source: str, overrides: Sequence[str], site: str | None, way: Way) -> int:
    """Start a new run; returns the exit status."""
    config = _fit(Config.load(source, overrides, site or run_folders.site()), way)
    config = run_folders.with_name(config, stem=find_config(source).stem)
    _check(config, way)
    if way is Way.DRY_RUN:
        return _dry_run(config)
    run = run_folders.create(config)
    try:
        status = _start(config, run, way)
    except ConfigError:
        run_folders.remove(run)
        raise
    if status == 2 and not run.checkpoints.exists():  # the ranks refused the configuration
        run_folders.remove(run)
    return status


def resume(name: str, overrides: Sequence[str], way: Way) -> int:
    """Go on with a run, perhaps at another size; returns the exit status."""
    root = run_folders.root_of([word for word in overrides if word.startswith("launch.root=")])
    run = run_folders.find(name, root)
    for word in overrides:
        if not word.startswith("launch.") or word.startswith("launch.name="):
            raise ConfigError(
                f"{word}: a resumed run keeps its configuration; only launch.* may change, or start a new run"
            )
    config = _fit(run_folders.load(run, overrides), way)
    _check(config, way)
    if way is Way.DRY_RUN:
        return _dry_run(config)
    alive = submission.living_jobs(run)
    if alive:
        end = f"python launch.py cancel {run.name}{root_hint(config.launch)}"
        raise ConfigError(f"{run.name}: job {alive[0]} of this run is in the queue; `{end}` ends it first")
    machine_checks.check_writable(run.path)
    config.save(run.config)
    return _start(config, run, way)


def _fit(config: Config, way: Way) -> Config:
    """--debug is one process, whatever the configuration says of nodes; a job has its cluster's grace."""
    if way is Way.DEBUG:
        alone = dataclasses.replace(
            config.launch, nodes=1, tasks_per_node=None, gpus_per_node=min(1, config.launch.gpus_per_node)
        )
        return dataclasses.replace(config, launch=alone)
    return config if way is Way.LOCAL else submission.with_grace(config)


def _check(config: Config, way: Way) -> None:
    machine_checks.check_names(config)
    machine_checks.check_writable(Path(config.launch.root))
    if way in (Way.LOCAL, Way.DEBUG):
        machine_checks.check_local(config)
    else:
        machine_checks.check_submission(config)
    if way in (Way.SLURM, Way.FOLLOW):
        machine_checks.check_slurm()


def _start(config: Config, run: RunDir, way: Way) -> int:
    launch = config.launch
    if way is Way.DEBUG:
        return local.run_debug(config)
    if way is Way.LOCAL:
        print(f"run    {run.name}\nranks  {launch.world_size} on this machine\nfolder {_short(run.path)}", flush=True)
        status = local.run_local(config, run)
        if status > 128 and any(
            record["reason"] for record in records_of(run)[-1:]
        ):  # not when a second Ctrl-C has killed the ranks
            resume = f"python launch.py resume {run.name} --local{root_hint(launch)}"
            print(f"[laststep] stopped and saved; go on with: {resume}")
        return status
    job = submission.submit_run(config, run)
    print(f"run    {run.name}")
    print(f"job    {job.job_id}: {launch.nodes} nodes x {launch.ranks_per_node} ranks")
    print(f"folder {_short(run.path)}")
    print(f"log    {_short(job.paths.stdout)} (rank 0)")
    for verb in ("logs -f", "status", "cancel"):
        print(f"next   python launch.py {verb} {run.name}{root_hint(launch)}", flush=True)
    return follow.follow(run, job) if way is Way.FOLLOW else 0


def _dry_run(config: Config) -> int:
    run = RunDir(Path(config.launch.root) / str(config.launch.name))
    print(f"# {_short(run.config)}\n{config.to_yaml()}")
    print(f"# sbatch script\n{submission.make_executor(config, run).script()}")
    return 0


def root_hint(launch: Launch) -> str:
    """What a command about a run must say besides its name."""
    default = os.path.abspath(Launch().root)
    return "" if launch.root == default else f" launch.root={launch.root}"


def _short(path: os.PathLike[str]) -> str:
    """Relative to here, where that is shorter."""
    return min(os.fspath(path), os.path.relpath(path), key=len)

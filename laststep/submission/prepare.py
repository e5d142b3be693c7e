"""From a configuration as it was written to one that can start: its name, its root, its grace, and all checks.

Every start of a run passes here: submit, resume and sweep, `laststep.submit` from Python, and `python -m laststep`.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path

from laststep.config.checks import check_replicas, check_shards
from laststep.config.config import Config
from laststep.config.schema import without_gpus
from laststep.ranks.slurm import EXPEDITE, cluster_settings, is_silent
from laststep.runs import run_folders
from laststep.runs.weights_source import check_weights, with_absolute_weights
from laststep.submission import machine_checks


class Way(enum.Enum):
    """Where the ranks run, and whether the command stays."""

    SLURM = "slurm"  # in a job; the command returns
    FOLLOW = "follow"  # in a job; the command prints rank 0's log until the run ends
    LOCAL = "local"  # all on this machine, as processes of the command
    DEBUG = "debug"  # one rank, in the process of the command
    DRY_RUN = "dry_run"  # nowhere: what would be submitted is printed
    RANK = "rank"  # this process is a rank, started by another launcher (torchrun, srun, mpirun)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Way:
        """The way chosen by the options of submit and resume; each option is named like its way."""
        optional = (cls.FOLLOW, cls.LOCAL, cls.DEBUG, cls.DRY_RUN)
        return next((way for way in optional if getattr(args, way.value)), cls.SLURM)


def prepare(config: Config, way: Way, stem: str = "run", search: Sequence[Path] = ()) -> Config:
    """The configuration adapted to this way of running, with an absolute root and a name (made from `stem` if none is
    given), and checked as far as is possible on this machine. Raises ConfigError. Creates nothing.

    `search` holds the folders in which Python looks for the task first; by default the current one.
    """
    config = run_folders.with_root_and_name(_fit(config, way), stem)
    _check(config, way, search)
    if config.task == "language":
        from laststep.tasks.sizes import check_same_data  # imports numpy

        check_same_data(config)
    return _for_cluster(with_absolute_weights(config), way)


def prepare_new(config: Config, way: Way, stem: str = "run") -> Config:
    """`prepare` for a new run, with an absolute data.root. Raises ConfigError also when the name is taken."""
    config = run_folders.with_root_and_name(_fit(config, way), stem)
    run_folders.check_name_is_free(config)
    _check(config, way)  # before data.root is made absolute: the messages show it as it was typed
    check_weights(config)
    return _for_cluster(run_folders.with_absolute_data(with_absolute_weights(config)), way)


def _fit(config: Config, way: Way) -> Config:
    """--debug overrides the configuration with one process."""
    if way is not Way.DEBUG:
        return config
    launch = config.launch
    gpus, slurm = min(1, launch.gpus), without_gpus(launch.slurm)
    launch = dataclasses.replace(launch, nodes=1, spare_nodes=0, tasks_per_node=None, gpus_per_node=gpus, slurm=slurm)
    train = dataclasses.replace(config.train, sharding="none")
    checkpoint = dataclasses.replace(config.checkpoint, replicas=0)
    return dataclasses.replace(config, launch=launch, train=train, checkpoint=checkpoint)


def _for_cluster(config: Config, way: Way) -> Config:
    """A job without a grace time gets that of its cluster, and an expedited requeue where the cluster allows it."""
    if way not in (Way.SLURM, Way.FOLLOW, Way.DRY_RUN):
        return config
    if way is Way.DRY_RUN and is_silent():  # the other ways have passed check_slurm
        return config
    launch, cluster = config.launch, cluster_settings()
    slurm = dict(launch.slurm)
    if slurm.get("requeue") == EXPEDITE:  # set here, perhaps on a cluster that allowed it
        del slurm["requeue"]
    if cluster.expedites and not {"requeue", "no-requeue", "no_requeue"} & slurm.keys():
        slurm["requeue"] = EXPEDITE
    grace_s = cluster.kill_wait_s if launch.grace_s is None else launch.grace_s
    return dataclasses.replace(config, launch=dataclasses.replace(launch, grace_s=grace_s, slurm=slurm))


def _check(config: Config, way: Way, search: Sequence[Path] = ()) -> None:
    machine_checks.check_names(config, search or [Path.cwd()])
    if way is Way.RANK:
        return  # the rank itself finds out about its machine
    launch = config.launch
    check_shards(config.train, launch.node_counts[0], launch.ranks_per_node)
    check_replicas(config.checkpoint.replicas, launch.node_counts[0])
    run_folders.check_writable(Path(config.launch.root))
    if way in (Way.LOCAL, Way.DEBUG):
        machine_checks.check_local(config)
    else:
        machine_checks.check_submission(config)
    if way in (Way.SLURM, Way.FOLLOW):
        machine_checks.check_slurm()
        machine_checks.check_partition(config.launch)

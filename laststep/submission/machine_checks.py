"""Checks before a start or a submission: refuse what this machine already knows will fail. Imports no torch."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from laststep.code.task_check import check_task, definition, may_make_optimizer
from laststep.config.checks import check_batch
from laststep.config.config import Config
from laststep.config.errors import ConfigError, nearest
from laststep.config.schema import Data, Launch
from laststep.data.catalog import DATA_ARGS, DATASETS, FLAGS, TEXTS
from laststep.optim.names import check_optimizer
from laststep.ranks.slurm import SlurmError, check_conf, is_silent, show_partitions
from laststep.say import counted
from laststep.tasks.models import check_model_name

WITHOUT_SLURM = "add --local to train here, or try a throwaway Slurm with `make slurm`"


def check_names(config: Config, search: Sequence[Path] = ()) -> None:
    """Check that the task exists, which is looked for in the folders `search` first, and the optimiser unless the task
    may make its own; for the ready-made task, the model and the data set too. Raises ConfigError."""
    if config.task == "language":
        from laststep.tasks.sizes import check_language  # imports numpy

        check_optimizer(config.optim)
        return check_language(config)
    if config.task != "classification":
        check_task(config.task, search)
        if isinstance(definition(config.task, search)[1], ast.ClassDef):
            train = config.train
            check_batch(train.batch_size, config.launch.world_sizes, train.accumulate, train.shares)
        if not may_make_optimizer(config.task, search):
            check_optimizer(config.optim)
        return
    if config.args:
        raise ConfigError(
            f"args.{next(iter(config.args))}: task={config.task} does not read args; these are settings of a task of "
            "your own"
        )
    check_optimizer(config.optim)
    check_model_name(config.model.name)
    data = config.data
    if data.name in TEXTS:
        raise ConfigError(f"data.name={data.name}: is text, for task=language; task={config.task} takes images")
    if data.name not in DATASETS:
        raise ConfigError(f"data.name={data.name}: no such data set; {nearest(data.name, list(DATASETS))}")
    known = DATA_ARGS[data.name]
    for name, value in data.args.items():
        if name not in known:
            raise ConfigError(f"data.args.{name}: {data.name} has no such option; {nearest(name, sorted(known))}")
        if name in FLAGS and not isinstance(value, bool):
            raise ConfigError(f"data.args.{name}={value}: must be true or false")
        if name not in FLAGS and (not isinstance(value, int) or not 0 < value < 2**63):
            raise ConfigError(f"data.args.{name}={value}: must be a positive integer of up to 64 bits")
    if data.args.get("cache") and data.args.get("decode_on_device"):
        raise ConfigError(
            "data.args.decode_on_device=true: data.args.cache keeps images off the device; leave one of them out"
        )
    _check_data_root(data)


def check_slurm() -> None:
    """Check that Slurm's commands are here, find their configuration, and get an answer. Raises ConfigError."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise ConfigError(f"no Slurm on this machine (sbatch not found): {WITHOUT_SLURM}")
    try:
        check_conf()
    except SlurmError as error:
        raise ConfigError(str(error)) from None
    if is_silent():
        raise ConfigError("Slurm does not answer (scontrol ping); try again later (--local would train one run here)")


def check_local(config: Config) -> None:
    """Check that this machine has the GPUs that a local run asks for. Raises ConfigError."""
    launch, here = config.launch, count_gpus()
    if launch.spare_nodes:
        raise ConfigError(
            f"launch.spare_nodes={launch.spare_nodes}: --local has no other nodes; add launch.spare_nodes=0"
        )
    if launch.gpus > here:
        fix = f"use --gpus-per-node {here}" if here else "leave it out to train on the CPU"
        if not launch.gpus_per_node:
            fix = f"{launch.gpus_key.partition('=')[0]}=null leaves it out"
        raise ConfigError(f"{launch.gpus_key}: this machine has {counted(here, 'GPU')}; {fix}")
    if config.device == "cuda" and not here:
        raise ConfigError("device=cuda: this machine has no GPU; use device=cpu or device=auto")


def check_submission(config: Config) -> None:
    """Check that a job that needs GPUs asks for some. Raises ConfigError."""
    if config.device == "cuda" and not config.launch.gpus:
        raise ConfigError("device=cuda: the job asks for no GPU; add --gpus-per-node N")


def check_partition(launch: Launch) -> None:
    """Check that the job's partition has as many nodes as it asks for. Raises ConfigError: such a job never starts."""
    names = launch.partition or os.environ.get("SBATCH_PARTITION")
    if {"clusters", "M"} & set(launch.slurm):  # another cluster's partition
        return
    partitions = [one for one in show_partitions(names) if one.get("TotalNodes", "").isdecimal()]
    most = max((int(one["TotalNodes"]) for one in partitions), default=None)
    fewest = int(launch.job_nodes.partition("-")[0])
    if most is not None and fewest > most:
        name = ",".join(one["PartitionName"] for one in partitions)
        spare = f" launch.spare_nodes={launch.spare_nodes}" if launch.spare_nodes else ""
        raise ConfigError(
            f"launch.nodes={launch.nodes}{spare}: partition {name} has {counted(most, 'node')}, so the job would never "
            f"start; use {'fewer' if spare else f'at most --nodes {most}'}, or another --partition"
        )


def check_run_writable(folder: Path) -> None:
    """Check that a run may continue in its folder. Raises ConfigError."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder.name}: you may not write to {folder}, so this run cannot continue there")


def count_gpus() -> int:
    """The number of NVIDIA GPUs that a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def _check_data_root(data: Data) -> None:
    root = Path(data.root)
    if data.name in ("mnist-5k", "fake"):
        return
    if root.exists() and not root.is_dir():
        raise ConfigError(f"data.root={root}: is not a folder")
    if data.name == "imagefolder":
        for part in ("train", "val"):
            folder = root / part
            if not folder.is_dir():
                raise ConfigError(
                    f"data.root={root}: {folder} is missing; imagefolder reads train/CLASS/*.jpg and val/CLASS/*.jpg"
                )
            if not any(entry.is_dir() for entry in folder.iterdir()):
                raise ConfigError(f"data.root={root}: {folder} is empty; it must hold one folder of images per class")

"""Checks of the ready-made tasks that need no torch, so that a command can refuse a configuration at once."""

from __future__ import annotations

from pathlib import Path

from laststep.config.config import Config
from laststep.config.errors import ConfigError, nearest
from laststep.config.machine import Machine
from laststep.config.schema import Data
from laststep.data.catalog import DATA_ARGS, DATASETS, FLAGS, TEXTS
from laststep.optim.names import check_optimizer
from laststep.tasks.models import check_model_name


def check(config: Config, machine: Machine) -> None:
    """Raise ConfigError unless the optimiser, the model and the data set of a ready-made task exist, and the data are
    those that a run began with."""
    if config.task == "language":
        from laststep.tasks.sizes import check_language, check_same_data  # imports numpy

        check_optimizer(config.optim)
        check_language(config)
        if not machine.new:
            check_same_data(config)
    elif config.task == "classification":
        if config.args:
            raise ConfigError(
                f"args.{next(iter(config.args))}: task={config.task} does not read args; these are settings of a task "
                "of your own"
            )
        check_optimizer(config.optim)
        check_model_name(config.model.name)
        _check_images(config.data)


def _check_images(data: Data) -> None:
    if data.name in TEXTS:
        raise ConfigError(f"data.name={data.name}: is text, for task=language; task=classification takes images")
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
    _check_root(data)


def _check_root(data: Data) -> None:
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

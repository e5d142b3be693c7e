"""Finding weights by what a user types: a run's name or folder, the folder of a checkpoint, or a file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.checkpoint.export import READABLE, check_readable
from laststep.checkpoint.store import MANIFEST, CheckpointStore
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.tasks.models import check_weights_name, is_weights_name

if TYPE_CHECKING:
    from torch import Tensor


def load_weights(
    run_or_path: str | os.PathLike[str], step: int | None = None, best: bool = False, raw: bool = False
) -> dict[str, Tensor]:
    """The weights of a trained model, ready for `model.load_state_dict`.

    `run_or_path` is a run's name or folder, the folder of one of its checkpoints, or a .safetensors or .pt file. Of a
    run, the newest checkpoint is read, or that of `step`, or with `best` the best one. They
    are the averaged weights where train.ema_decay is set, or with `raw` the weights themselves. The names are those of
    the plain model, without the prefixes of DistributedDataParallel or torch.compile; the names in a file stay as they
    are. The tensors are on the CPU.

    Raises ConfigError, a ValueError, when there are no such weights or they are damaged.
    """
    from laststep.checkpoint.export import read_source

    root = run_folders.runs_root([])
    return read_source(find_source(os.fspath(run_or_path), root), step, best, raw)


def find_source(words: str, root: str) -> Path:
    """The absolute path of the file, checkpoint or run that `words` name. Raises ConfigError when there is none."""
    path = Path(os.path.expanduser(words)).absolute()
    if os.path.isfile(path) or os.path.isfile(path / MANIFEST):  # unlike Path.is_file, never raise
        return path
    if path.suffix in READABLE:
        raise ConfigError(f"{words}: no such file")
    return run_folders.find_run(words, root).path


def with_absolute_weights(config: Config) -> Config:
    """The configuration with an absolute path in model.weights, since the job may start in another folder."""
    given = config.model.weights
    if given is None or is_weights_name(given):
        return config
    try:
        path = find_source(given, config.launch.root)
    except ConfigError:  # checked elsewhere: a resumed run needs its weights no more
        path = Path(os.path.expanduser(given)).absolute()
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=str(path)))


def check(config: Config, machine: Machine) -> None:
    """Check that model.weights of a new run names something, and that it is there. Raises ConfigError."""
    given = config.model.weights
    if given is None or not machine.new:
        return
    if is_weights_name(given):
        return check_weights_name(config.model.name, given)
    try:
        path = find_source(given, config.launch.root)
        if path.is_file():
            check_readable(path)
    except ConfigError as error:
        name = given.upper()
        hint = f"; torchvision's weights are called {name}, in capitals" if is_weights_name(name) else ""
        raise ConfigError(f"model.weights={error}{hint}") from None
    if path.is_dir() and not (path / MANIFEST).exists() and not CheckpointStore(RunDir(path).checkpoints).steps():
        raise ConfigError(f"model.weights={given}: this run has no checkpoint yet")

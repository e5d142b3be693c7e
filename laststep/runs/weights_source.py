"""Finding weights by what a user types: a run's name or folder, the folder of a checkpoint, or a file; and
checkpoints of other tools."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.checkpoint import foreign
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


def is_foreign(words: str) -> bool:
    """Whether these words name a checkpoint of another tool rather than a run. Raises ConfigError for a file that is
    not there."""
    path = Path(os.path.expanduser(words))
    if os.path.isfile(path / MANIFEST) or os.path.isdir(path / "checkpoints"):
        return False
    if path.suffix in READABLE and not os.path.exists(path):
        raise ConfigError(f"--from {words}: no such file")
    return os.path.isfile(path) or foreign.kind_of(path) is not None


def find_source(words: str, root: str) -> Path:
    """The absolute path of the file, checkpoint or run that `words` name. Raises ConfigError when there is none."""
    path = Path(os.path.expanduser(words)).absolute()
    if os.path.isfile(path) or os.path.isfile(path / MANIFEST):  # unlike Path.is_file, never raise
        return path
    if path.suffix in READABLE:
        raise ConfigError(f"{words}: no such file")
    return run_folders.find_run(words, root).path


def with_absolute_weights(config: Config) -> Config:
    """The configuration with absolute paths in model.weights and checkpoint.start_from, since the job may start in
    another folder."""
    if config.checkpoint.start_from is not None:
        path = Path(os.path.expanduser(config.checkpoint.start_from)).absolute()
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, start_from=str(path)))
    given = config.model.weights
    if given is None or is_weights_name(given):
        return config
    try:
        path = find_source(given, config.launch.root)
    except ConfigError:  # checked elsewhere: a resumed run needs its weights no more
        path = Path(os.path.expanduser(given)).absolute()
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=str(path)))


def check(config: Config, machine: Machine) -> None:
    """Check that model.weights and checkpoint.start_from of a new run name something that is there. Raises
    ConfigError."""
    if config.checkpoint.start_from is not None and machine.new:
        _check_start(config, config.checkpoint.start_from)
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


def _check_start(config: Config, given: str) -> None:
    key = f"checkpoint.start_from={given}"
    if config.model.weights is not None:
        raise ConfigError(f"{key}: has the weights already; leave model.weights out")
    if config.train.sharding != "none":
        raise ConfigError(
            f"{key}: not with train.sharding={config.train.sharding}; start from its weights alone (model.weights), or "
            "shard in a custom loop"
        )
    path = Path(os.path.expanduser(given))
    if not os.path.exists(path):
        raise ConfigError(f"{key}: no such file or folder")
    if os.path.isfile(path / MANIFEST) or os.path.isdir(path / "checkpoints"):
        raise ConfigError(f"{key}: is of a run; branch off it by --from {given}")
    if foreign.kind_of(path) is None:
        raise ConfigError(
            f"{key}: no checkpoint that can be read: a file ({', '.join(READABLE)}), or a folder of "
            "torch.distributed.checkpoint or transformers"
        )

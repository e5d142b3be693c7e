"""Checks of a configuration for task=language that need no torch, so that a command can refuse it at once."""

from __future__ import annotations

from pathlib import Path

from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.config.errors import ConfigError, nearest
from laststep.data.corpus import Corpus
from laststep.records.data_record import check_fingerprint
from laststep.rundir import RunDir
from laststep.tasks.sizes import size_of

ARGS = ("z_loss",)


def check_language(config: Config) -> None:
    """Raise ConfigError unless the data are there, and the model fits them."""
    z_loss_of(config)
    corpus = Corpus.open(config.data)
    size_of(config.model.name, config.model.args, corpus.vocabulary.size)


def check_same_data(config: Config) -> None:
    """Raise ConfigError if the run of this configuration has checkpoints, and began with other data. The ranks check
    this again."""
    run = RunDir(Path(config.launch.root) / str(config.launch.name))
    if CheckpointStore(run.checkpoints).steps():
        check_fingerprint(run.data, Corpus.open(config.data).fingerprint, f"data.name={config.data.name}")


def z_loss_of(config: Config) -> float:
    """The weight of the z-loss. Raises ConfigError for args that the task does not read."""
    for name in config.args:
        if name not in ARGS:
            raise ConfigError(f"args.{name}: task={config.task} does not read it; {nearest(name, ARGS)}")
    found = config.args.get("z_loss", 0.0)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1:
        raise ConfigError(f"args.z_loss={found}: must be at least 0 and below 1, e.g. 1e-4")
    return float(found)

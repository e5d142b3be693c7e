"""A Task's data sets, and the validation of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import READY_MADE
from laststep.data.decoded_cache import DecodedCache
from laststep.data.loader import LoaderFactory, ValidationBatchKeys
from laststep.loops.learner import Learner
from laststep.loops.loop import finite
from laststep.loops.shares import in_order, shares_of
from laststep.ranks.group import Group, tree_sum
from laststep.task import Task


def open_datasets(config: Config, task: Task, group: Group) -> tuple[Dataset[Any], Dataset[Any], list[int]]:
    """The training set, the validation set, and their sizes. A collective. Raises ConfigError when one is empty."""
    group.node_by_node(task.prepare)
    train_set, val_set = task.datasets()
    for name, dataset in (("train", train_set), ("val", val_set)):
        if isinstance(decoded := getattr(dataset, "decoded", None), DecodedCache):
            decoded.open_shared(group, name)
    counts = [len(dataset) for dataset in (train_set, val_set)]  # type: ignore[arg-type]
    if not all(counts):
        raise ConfigError(f"{named(config)}: empty ({counts[0]} training, {counts[1]} validation samples)")
    return train_set, val_set, counts


def named(config: Config) -> str:
    """What a message about the data names: a task of the user's own need not read `data.name`."""
    return f"data.name={config.data.name}" if config.task in READY_MADE else f"task={config.task}"


def make_loading(config: Config, task: Task, group: Group) -> LoaderFactory:
    """What makes the loaders of a Task's data sets."""
    collate = None if type(task).collate is Task.collate else task.collate
    return LoaderFactory(collate, config.data.workers, group.device)


class Validation:
    """Measures a learner's model on the validation set."""

    def __init__(
        self, config: Config, val_set: Dataset[Any], samples: int, loading: LoaderFactory, group: Group
    ) -> None:
        self._group, self._train = group, config.train
        shares, total = shares_of(config.train, group.world), config.train.shares or group.world.size
        self._keys = ValidationBatchKeys(samples, config.train.batch_size, shares, total)
        self._loader = loading.loader(val_set, config.seed, self._keys)

    def measure(self, learner: Learner, step: int, begin_batch: Callable[[], bool]) -> dict[str, float | None] | None:
        """The means over the validation set, named like val_loss; None for one that is not finite. A collective.

        `begin_batch` is called before each batch; once it returns False, so does this: None.
        """
        learner.train(False)
        shares = len(learner.shares)
        sums = torch.zeros(shares, len(learner.names), dtype=torch.float64, device=self._group.device)
        for position, batch in enumerate(self._loader):
            number, share = divmod(position, shares)
            if share == 0 and not begin_batch():
                return None
            sums[share] += learner.evaluate(step, number, batch, len(self._keys.indices(number, share)), share)
        learner.train(True)
        if self._train.shares is None:
            totals = self._group.sum(sums[0])
        else:
            totals = tree_sum(in_order(torch.stack(self._group.gather(sums)), self._train, self._group.world))
        means = [total / self._keys.samples for total in totals.tolist()]
        return {f"val_{name}": finite(mean) for name, mean in zip(learner.names, means)}

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()

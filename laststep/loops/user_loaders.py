"""The loaders that a training function iterates over."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.data import DataLoader

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.data.loader import LoaderFactory, StepLoader, end_workers, set_up_workers
from laststep.data.order import Order, SampledOrder, order_of, seed_of
from laststep.ranks.group import Group


class UserLoaders:
    """Remembers the loaders that a function has used, so that their worker processes end with the attempt."""

    def __init__(self, group: Group, task: str, shares: int) -> None:
        """`task` is the function's name, for error messages; `shares` is how many shares of a step a rank has."""
        self._group, self._shares = group, shares
        self._task = task
        self._loaders: list[StepLoader | DataLoader[Any]] = []
        self._side_loaders = 0
        self._checked: list[StepLoader] = []

    def make(
        self, loading: LoaderFactory, dataset: Any, seed: int, batch_size: int, sampler: Any, drop_last: bool
    ) -> StepLoader:
        """What run.loader(...) gives. Raises ConfigError."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"run.loader(): a {type(dataset).__name__} has no length or no __getitem__, so it cannot start in the "
                "middle; draw the batches yourself in a loop over run.steps(count=N)"
            )
        if not len(dataset):
            raise ConfigError("run.loader(): the data set is empty")
        samples = len(dataset)
        order = Order(samples, batch_size, seed, drop_last)
        if sampler is not None:
            order = order_of(sampler, samples, batch_size, seed, drop_last)
        if not order.steps_per_epoch:
            raise ConfigError(
                f"run.loader(batch_size={batch_size}, drop_last=True): there are only {order.samples} samples"
            )
        world = self._group.world
        loader = StepLoader(loading, dataset, order, world.rank, world.size, self._shares)
        self.add(loader)
        return loader

    def add(self, loader: StepLoader) -> None:
        """Remember a loader that run.loader(...) made."""
        self._loaders.append(loader)

    def another(self, loader: StepLoader, seed: int) -> StepLoader:
        """A loader of the same samples in an order of its own, for run.batches(...). A collective. Raises
        ConfigError."""
        self._side_loaders += 1
        own = loader.reseeded(seed_of("batches", seed, self._side_loaders))
        self.check_order(own)
        self.add(own)
        return own

    def check_order(self, loader: StepLoader) -> None:
        """Raise ConfigError if ranks have different orders of samples. A collective, at the first use of a sampler."""
        if not isinstance(loader.order, SampledOrder) or loader in self._checked:
            return
        self._checked.append(loader)
        digest = hashlib.blake2b(loader.order.indices(0).tobytes(), digest_size=7).digest()
        mine = torch.tensor(int.from_bytes(digest, "little"), device=self._group.device)
        if len({int(each) for each in self._group.gather(mine)}) > 1:
            raise ConfigError(
                f"task={self._task}: run.loader(sampler=...): its order differs between ranks; it must be that of the "
                "global batches, of which run.loader(...) gives each rank its share"
            )

    def prepare(self, loader: Any) -> None:
        """Check and remember a DataLoader at its first use; its workers shall leave stop signals to the rank. Raises
        ConfigError."""
        if isinstance(loader, DataLoader) and loader not in self._loaders:
            self._check_length(len(loader))
            set_up_workers(loader)
            self._loaders.append(loader)

    def close(self) -> None:
        """End all worker processes."""
        for loader in self._loaders:
            if isinstance(loader, StepLoader):
                loader.close()
            else:
                end_workers(compat.kept_iterator(loader))

    def _check_length(self, length: int) -> None:
        """Raise ConfigError unless all ranks have the same number of batches: they could not agree on where to stop."""
        lengths = [int(each) for each in self._group.gather(torch.tensor(length, device=self._group.device))]
        if len(set(lengths)) > 1:
            raise ConfigError(
                f"task={self._task}: run.validation(...) needs as many batches on every rank, not {lengths}; "
                "DistributedSampler gives them"
            )

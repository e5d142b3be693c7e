"""The loaders that a training function iterates over."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer import compat
from trainer.config.errors import ConfigError
from trainer.data.loader import StepLoader, end_workers, set_up_workers
from trainer.data.sampled_order import SampledOrder
from trainer.world.group import Group


class UserLoaders:
    """Remembers the loaders that a function has used, so that their worker processes end with the attempt."""

    def __init__(self, group: Group, task: str) -> None:
        """`task` is the function's name, for error messages."""
        self._group = group
        self._task = task
        self._loaders: list[StepLoader | DataLoader[Any]] = []
        self._checked: list[StepLoader] = []

    def add(self, loader: StepLoader) -> None:
        """Remember a loader that run.loader(...) made."""
        self._loaders.append(loader)

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

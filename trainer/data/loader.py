"""Batches for one rank, from any step on, the same whoever loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data.order import Order, seed_generators, seed_of
from trainer.world.signals import set_up_worker

VALIDATION = -1  # in the place of an epoch: a validation sample is the same in every epoch
Key = tuple[int, int]  # epoch, sample index


class _Draws(Dataset[Any]):
    """A data set whose every sample draws its own random numbers, from (seed, epoch, index) alone.

    So it does not matter which worker loads a sample, how many workers there are, or what was loaded before.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed_generators(seed_of("sample", self.seed, epoch, index))
        return self.dataset[index]


@dataclass(frozen=True)
class Loading:
    """How batches are loaded: `workers` processes (0: in the rank itself), into pinned memory or not. A batch that
    takes longer than `timeout_s` is an error: a worker may be stuck."""

    collate: Callable[[Sequence[Any]], Any]
    workers: int
    pin: bool
    timeout_s: float

    def loader(self, dataset: Dataset[Any], seed: int, batches: Iterable[list[Key]]) -> DataLoader[Any]:
        """A DataLoader over `batches`; each iteration over it starts `batches` anew."""
        return DataLoader(
            _Draws(dataset, seed),
            batch_sampler=batches,
            num_workers=self.workers,
            timeout=self.timeout_s if self.workers else 0,
            collate_fn=self.collate,
            pin_memory=self.pin,
            worker_init_fn=set_up_worker,
            # Not the global generator: what the loader draws to seed its workers would shift the model's draws.
            generator=torch.Generator().manual_seed(seed_of("loader", seed)),
            persistent_workers=self.workers > 0,
            multiprocessing_context="fork" if self.workers else None,
        )

    def warm_up_batch(self, dataset: Dataset[Any], seed: int, count: int) -> Any:
        """A batch of `count` samples of the right shape, for a step that is thrown away."""
        draws = _Draws(dataset, seed)
        return self.collate([draws[0, i % len(dataset)] for i in range(count)])  # type: ignore[arg-type]


def close_loader(batches: Iterator[Any]) -> None:
    """End a loader's workers now. Left to the interpreter's exit, it would ask them by SIGTERM, which they ignore,
    and wait for ever."""
    workers = getattr(batches, "_workers", [])
    if workers:
        batches._shutdown_workers()  # type: ignore[attr-defined]  # what torch itself calls when it drops the iterator
    for worker in workers:
        if worker.is_alive():
            worker.kill()


@dataclass(frozen=True)
class TrainBatches:
    """Sample keys of the rank's micro-batches for `steps`, one after another, over the ends of epochs.

    A micro-batch that is empty for this rank (in a short last batch) holds two samples all the same, since a model may
    not take fewer; `Order.share_counts` says that they count for nothing.
    """

    order: Order
    steps: range
    rank: int
    size: int
    micro_batches: int

    def __iter__(self) -> Iterator[list[Key]]:
        for step in self.steps:
            epoch = self.order.epoch(step)
            for share in self.order.share(step, self.rank, self.size, self.micro_batches):
                yield [(epoch, index) for index in share or self.order.batch(step)[:2]]


@dataclass(frozen=True)
class ValidationBatches:
    """Sample keys of the rank's share of each validation batch; all ranks have the same number of batches."""

    samples: int
    batch_size: int
    rank: int
    size: int

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def share(self, batch: int) -> range:
        """Sample indices of the rank's share of `batch`, possibly none."""
        start = batch * self.batch_size
        count = min(self.batch_size, self.samples - start)
        return range(start + count * self.rank // self.size, start + count * (self.rank + 1) // self.size)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in range(len(self)):
            yield [(VALIDATION, index) for index in self.share(batch) or range(1)]

"""Batches for one rank, on its device, from any step on, the same whoever loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from trainer import compat
from trainer.config.errors import ConfigError
from trainer.data.order import Order, seed_generators, seed_of
from trainer.data.pixels import Images
from trainer.world.signals import set_up_worker

VALIDATION = -1  # in the place of an epoch: a validation sample is the same in every epoch
Key = tuple[int, Sequence[int]]  # of a batch: epoch, sample indices
# Tensors of so many bytes may lie on a GPU for good, for batches to be taken there.
ON_GPU_BYTES = 1 << 30


@dataclass(frozen=True)
class Loading:
    """How batches are loaded: `workers` processes (0: in the rank itself) make them of samples by `collate` (None:
    torch's own way), for `device`. A batch that takes longer than `timeout_s` is an error: a worker may be stuck."""

    collate: Callable[[list[Any]], Any] | None
    workers: int
    device: torch.device
    timeout_s: float

    def loader(self, dataset: Dataset[Any], seed: int, keys: Iterable[Key]) -> Loader:
        """The batches of these keys; each iteration begins anew."""
        if self.collate is None and type(dataset) in (TensorDataset, Images):
            tensors: tuple[Tensor, ...] = dataset.tensors  # type: ignore[attr-defined]
            if self.device.type == "cpu" or sum(tensor.nbytes for tensor in tensors) <= ON_GPU_BYTES:
                return Loader(_FromMemory(dataset, seed, keys, self.device), self.device)
        return Loader(self._from_samples(dataset, seed, keys), self.device)

    def warm_up_batch(self, dataset: Dataset[Any], seed: int, count: int) -> Any:
        """A batch of `count` samples of the right shape, for a step that is thrown away."""
        keys = [(0, [i % len(dataset) for i in range(count)])]  # type: ignore[arg-type]
        return next(iter(replace(self, workers=0).loader(dataset, seed, keys)))

    def _from_samples(self, dataset: Dataset[Any], seed: int, keys: Iterable[Key]) -> DataLoader[Any]:
        return DataLoader(
            _Batches(dataset, seed, self.collate or default_collate),
            sampler=keys,
            batch_size=None,  # an item is a whole batch
            collate_fn=_as_it_is,
            num_workers=self.workers,
            timeout=self.timeout_s if self.workers else 0,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=set_up_worker,
            # Not the global generator: what the loader draws to seed its workers would shift the model's draws.
            generator=torch.Generator().manual_seed(seed_of("loader", seed)),
            persistent_workers=self.workers > 0,
            multiprocessing_context="fork" if self.workers else None,
        )


class Loader:
    """Batches on the device, one after another; each iteration begins anew."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if isinstance(batch, ConfigError):
                raise batch
            yield batch if self._copying is None else self._copied(batch, self._copying)

    def close(self) -> None:
        """End its workers."""
        end_workers(compat.kept_iterator(self.batches))  # kept where there are workers

    def _copied(self, batch: Any, copying: torch.cuda.Stream) -> Any:
        """On the GPU, by a stream of its own: the copy does not wait for what is computed there meanwhile."""
        with torch.cuda.stream(copying):
            batch = for_each_tensor(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(copying)

        def used(tensor: Tensor) -> Tensor:
            """Its memory must not be given to the next copy before the computation has come so far."""
            tensor.record_stream(computing)
            return tensor

        return for_each_tensor(used, batch)


def end_workers(iterator: Any) -> None:
    """End those of an iteration over a DataLoader now. Left to the interpreter's exit, it would ask them by SIGTERM,
    which they ignore, and wait for ever."""
    workers = compat.worker_processes(iterator)
    if workers:
        compat.shut_down_workers(iterator)
    for worker in workers:
        if worker.is_alive():
            worker.kill()


def set_up_workers(loader: DataLoader[Any]) -> None:
    """Have the workers of a loader that somebody else has made leave stop signals to the rank."""
    if loader.num_workers:
        loader.worker_init_fn = _WorkerSetup(loader.worker_init_fn)


@dataclass(frozen=True)
class _WorkerSetup:
    """What a worker process does first. A class, since a function made here could not be sent to one."""

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        set_up_worker()
        if self.then is not None:
            self.then(number)


def for_each_tensor(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A nested batch with each of its tensors replaced."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: for_each_tensor(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named one
        return type(batch)(*(for_each_tensor(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(for_each_tensor(function, value) for value in batch)
    return batch


class _Batches(Dataset[Any]):
    """Whole batches of samples, each of which draws its own random numbers, from (seed, epoch, index) alone.

    So it does not matter which worker loads a sample, how many workers there are, or what was loaded before.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate

    def __getitem__(self, key: Key) -> Any:
        epoch, indices = key
        samples = []
        try:
            for index in indices:
                seed_generators(seed_of("sample", self.seed, epoch, index))
                samples.append(self.dataset[index])
        except ConfigError as error:
            return error  # for the rank to raise: an exception would leave the worker as the text of a traceback
        return self.collate(samples)


class _FromMemory:
    """Batches of a data set that is held in memory: each is taken at once, on the device, without a sample made."""

    def __init__(self, dataset: Any, seed: int, keys: Iterable[Key], device: torch.device) -> None:
        self.dataset = dataset
        self.seed = seed
        self.keys = keys
        self.device = device
        self.tensors = [tensor.to(device) for tensor in dataset.tensors]

    def __iter__(self) -> Iterator[list[Tensor]]:
        for epoch, indices in self.keys:
            rows = torch.from_numpy(numpy.array(indices))  # torch.tensor of a list takes five times as long
            if self.device.type == "cuda":
                rows = rows.pin_memory().to(self.device, non_blocking=True)
            batch = [tensor.index_select(0, rows) for tensor in self.tensors]
            if isinstance(self.dataset, Images):
                draws = self.dataset.draws(self.seed, epoch, self.device)
                batch[0] = self.dataset.finish(batch[0], None if draws is None else draws[rows])
            yield batch


def _as_it_is(batch: Any) -> Any:
    return batch


@dataclass
class TrainBatches:
    """Keys of the rank's micro-batches for `steps`, one after another, over the ends of epochs.

    A micro-batch that is empty for this rank (in a short last batch) holds two samples all the same, since a model may
    not take fewer; `Order.share_counts` says that they count for nothing.
    """

    order: Order
    steps: range
    rank: int
    size: int
    micro_batches: int

    def __iter__(self) -> Iterator[Key]:
        for step in self.steps:
            epoch = self.order.epoch(step)
            for share in self.order.share(step, self.rank, self.size, self.micro_batches):
                yield epoch, share or self.order.batch(step)[:2]


class StepLoader:
    """The rank's batches of a training set, one a step, from any step on."""

    def __init__(self, loading: Loading, dataset: Dataset[Any], order: Order, rank: int, size: int) -> None:
        self.order = order
        self._keys = TrainBatches(order, range(0), rank, size, 1)
        self._loader = loading.loader(dataset, order.seed, self._keys)

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.order.steps_per_epoch

    def batches(self, first: int, steps: int) -> Iterator[Any]:
        """Those of so many steps from `first` on."""
        self._keys.steps = range(first, first + steps)
        return iter(self._loader)

    def close(self) -> None:
        """End its workers."""
        self._loader.close()


@dataclass(frozen=True)
class ValidationBatches:
    """Keys of the rank's share of each validation batch; all ranks have the same number of batches."""

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

    def __iter__(self) -> Iterator[Key]:
        for batch in range(len(self)):
            yield VALIDATION, self.share(batch) or range(1)

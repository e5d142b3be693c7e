"""Loads one rank's batches onto its device, starting at any step.

A batch is requested by its key, (epoch, sample indices), and a sample depends only on the seed and on its epoch and
index. So the batches are the same for any number of workers and ranks, and from wherever an attempt starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.data.order import Indices, Order, seed_generators, seed_of
from laststep.data.pixels import Images
from laststep.ranks.process import held_back, set_up_worker

VALIDATION = -1  # takes the place of the epoch: a validation sample is the same in every epoch
# A data set in memory is copied to the GPU as a whole if it is no larger than this; batches are then indexed there.
ON_GPU_BYTES = 1 << 30


@dataclass(frozen=True)
class LoaderFactory:
    """Makes loaders that share their settings.

    `workers` processes load the samples, 0 means the rank itself; `collate` makes a batch of them, None means torch's
    default. A batch may take any time: the watchdog ends an attempt whose worker hangs, and counts no time in which the
    ranks were suspended.
    """

    collate: Callable[[list[Any]], Any] | None
    workers: int
    device: torch.device
    pin_memory: bool = True
    persistent_workers: bool = True  # keep them from epoch to epoch

    def loader(self, dataset: Dataset[Any], seed: int, keys: Iterable[BatchKey]) -> DeviceLoader:
        """A loader of the batches with these keys."""
        return DeviceLoader(self._batches(dataset, seed, keys, self.device), self.device)

    def warm_up_batch(self, dataset: Dataset[Any], seed: int, count: int) -> Any:
        """A batch of `count` samples, for a warm-up step whose result is discarded.

        It is taken from memory on the CPU: just before memory is fullest, the GPU does not hold the data set twice.
        """
        keys = [(0, numpy.arange(count) % len(dataset))]  # type: ignore[arg-type]
        batches = replace(self, workers=0)._batches(dataset, seed, keys, torch.device("cpu"))
        return next(iter(DeviceLoader(batches, self.device)))

    def _batches(
        self, dataset: Dataset[Any], seed: int, keys: Iterable[BatchKey], indexed_on: torch.device
    ) -> Iterable[Any]:
        """The batches with these keys; those of a data set in memory are on the device `indexed_on`."""
        if self.collate is None and type(dataset) in (TensorDataset, Images):
            tensors: tuple[Tensor, ...] = dataset.tensors  # type: ignore[attr-defined]
            if indexed_on.type == "cpu" or sum(tensor.nbytes for tensor in tensors) <= ON_GPU_BYTES:
                return MemoryBatches(dataset, seed, keys, indexed_on)
        samples = _BatchDataset(dataset, seed, self.collate or default_collate)
        # Not the global generator: the loader draws a seed for its workers, which would shift the model's draws.
        generator = torch.Generator().manual_seed(seed_of("loader", seed))
        pin_memory = self.pin_memory and self.device.type == "cuda"
        return item_loader(samples, keys, self.workers, pin_memory, generator, self.persistent_workers)


class DeviceLoader:
    """Iterates over batches and copies each to the device. Every iteration starts from the first batch."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[Any]:
        with held_back():  # torch lets SIGTERM kill a worker until it calls `set_up_worker`
            batches = iter(self.batches)
        try:
            for batch in batches:
                if isinstance(batch, ConfigError):
                    raise batch
                yield batch if self._copying is None else self._to_device(batch, self._copying)
        finally:
            if compat.kept_iterator(self.batches) is None:
                end_workers(batches)

    def close(self) -> None:
        """End the worker processes."""
        end_workers(compat.kept_iterator(self.batches))  # a DataLoader keeps it if it has workers

    def _to_device(self, batch: Any, copying: torch.cuda.Stream) -> Any:
        """Copy a batch to the GPU on the stream `copying`, so that the copy need not wait for the current step."""
        with torch.cuda.stream(copying):
            batch = for_each_tensor(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(copying)

        def mark_as_used(tensor: Tensor) -> Tensor:
            """Keep the allocator from reusing this memory for a later copy before the computation has read it."""
            tensor.record_stream(computing)
            return tensor

        return for_each_tensor(mark_as_used, batch)


def end_workers(iterator: Any) -> None:
    """End the workers of an iteration over a DataLoader now. At the interpreter's exit they would get a SIGTERM, which
    they ignore, and the exit would wait for them without end."""
    workers = compat.worker_processes(iterator)
    if workers:
        compat.shut_down_workers(iterator)
    for worker in workers:
        if worker.is_alive():
            worker.kill()


def set_up_workers(loader: DataLoader[Any]) -> None:
    """Let the workers of a DataLoader that the user has made ignore stop signals, which are for the rank."""
    if loader.num_workers:
        loader.worker_init_fn = _WorkerSetup(loader.worker_init_fn)


@dataclass(frozen=True)
class _WorkerSetup:
    """Sets up a worker, then calls the user's own worker_init_fn. A class, since a closure cannot be pickled."""

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        set_up_worker()
        if self.then is not None:
            self.then(number)


def for_each_tensor(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A nested batch in which `function(tensor)` replaces each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: for_each_tensor(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a NamedTuple
        return type(batch)(*(for_each_tensor(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(for_each_tensor(function, value) for value in batch)
    return batch


@dataclass(eq=False)
class _BatchDataset(Dataset[Any]):
    """A data set whose items are whole batches, by key. Each sample's random draws depend only on (seed, epoch, index).

    So it does not matter which worker loads a sample, how many workers there are, or what was loaded before.
    """

    dataset: Dataset[Any]
    seed: int
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, key: BatchKey) -> Any:
        epoch, indices = key
        samples = []
        try:
            for index in numpy.asarray(indices).tolist():  # a data set may expect Python's integers
                seed_generators(seed_of("sample", self.seed, epoch, index))
                samples.append(self.dataset[index])
        except ConfigError as error:
            return error  # the rank raises it: an exception raised here would reach the rank as the text of a traceback
        return self.collate(samples)


def is_ours(dataset: Any) -> bool:
    """Whether this is the data set of a DataLoader that a run resumes by itself."""
    return isinstance(dataset, _BatchDataset) or any(dataset is each for each in _noted)


_noted: list[Any] = []


def note_ours(dataset: Any) -> None:
    """From now on this counts as the data set of such a DataLoader."""
    if not is_ours(dataset):
        _noted.append(dataset)


def item_loader(
    dataset: Dataset[Any],
    keys: Iterable[Any] | None,
    workers: int,
    pin_memory: bool,
    generator: torch.Generator,
    persistent_workers: bool = False,
) -> DataLoader[Any]:
    """A DataLoader of a data set whose items are whole batches."""
    return DataLoader(
        dataset,
        sampler=keys,
        batch_size=None,
        collate_fn=_identity,
        num_workers=workers,
        pin_memory=pin_memory,
        worker_init_fn=set_up_worker,
        generator=generator,
        persistent_workers=persistent_workers and workers > 0,
        multiprocessing_context="fork" if workers else None,
    )


def _identity(batch: Any) -> Any:
    return batch


@dataclass
class TrainBatchKeys:
    """The keys of the micro-batches that a rank has in `steps`, which may span epochs: `micro_batches` of each of its
    `shares`, of which there are `total`.

    A micro-batch that is empty for this rank, as in a short last batch, is replaced by two samples, since a model may
    not accept fewer. Its count is 0.
    """

    order: Order
    steps: range
    shares: Sequence[int]
    total: int
    micro_batches: int
    skipped: Sequence[int] = ()  # samples that are left out of their batches; all others stay where they are

    def __iter__(self) -> Iterator[BatchKey]:
        for step in self.steps:
            epoch = self.order.epoch(step)
            for share in self.shares:
                for indices in self.order.micro_batches(step, share, self.total, self.micro_batches):
                    indices = self._left(indices)
                    yield epoch, indices if len(indices) else self._filler(step)

    def _left(self, indices: Indices) -> Indices:
        return indices[~numpy.isin(indices, self.skipped)] if len(self.skipped) else indices

    def _filler(self, step: int) -> Indices:
        """Two samples in place of none."""
        batch = self.order.batch(step)
        return batch[:2] if not len(self._left(batch)) else self._left(batch)[:2]

    def samples(self, step: int) -> int:
        """How many samples of `step` count, on all ranks together."""
        return len(self._left(self.order.batch(step))) if len(self.skipped) else self.order.count(step)

    def counts(self, step: int) -> list[int]:
        """How many samples of each micro-batch of `step` count."""
        order = self.order
        if len(self.skipped):
            return [
                len(self._left(indices))
                for share in self.shares
                for indices in order.micro_batches(step, share, self.total, self.micro_batches)
            ]
        sizes = [order.micro_batch_sizes(step, share, self.total, self.micro_batches) for share in self.shares]
        return sizes[0] if len(sizes) == 1 else [size for of_share in sizes for size in of_share]


class StepLoader:
    """Loads this rank's batches of a training set for a custom training loop, starting at any step: one per step, or
    one for each of its shares (train.shares)."""

    def __init__(
        self, factory: LoaderFactory, dataset: Dataset[Any], order: Order, rank: int, size: int, shares: int = 1
    ) -> None:
        self.order = order
        self._parts = factory, dataset, rank, size, shares
        self._keys = TrainBatchKeys(order, range(0), [rank], size, shares)

    @cached_property
    def _loader(self) -> DeviceLoader:
        factory, dataset, *_ = self._parts
        return factory.loader(dataset, self.order.seed, self._keys)

    def reseeded(self, seed: int) -> StepLoader:
        """A loader of the same samples in another order."""
        factory, dataset, *place = self._parts
        return StepLoader(factory, dataset, replace(self.order, seed=seed), *place)

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.order.steps_per_epoch

    @property
    def batch_size(self) -> int:
        """Samples per step over all ranks; a short last batch has fewer."""
        return self.order.batch_size

    def samples(self, step: int) -> int:
        """The samples of `step` over all ranks."""
        return self.order.count(step)

    def weights(self, step: int) -> list[float]:
        """The part of the samples of `step` that each of this rank's batches has."""
        samples = self.order.count(step)
        return [count / samples for count in self._keys.counts(step)]

    def __iter__(self) -> Iterator[Any]:
        """Raises ConfigError: only run.steps(...) knows which batch is next."""
        raise ConfigError(
            "a loader that run.loader(...) gave is not iterated itself: write `for batch in run.steps(loader)`, or for "
            "a second loader `more = run.batches(loader)` before that loop and `next(more)` in it"
        )

    def batches(self, first: int, steps: int) -> Iterator[Any]:
        """The batches of `steps` steps, the first of which is step `first`."""
        self._keys.steps = range(first, first + steps)
        return iter(self._loader)

    def close(self) -> None:
        """End the worker processes."""
        if "_loader" in vars(self):
            self._loader.close()


@dataclass(frozen=True)
class StepNumbers:
    """In place of a StepLoader, for a loop that draws its own batches: an epoch of `count` steps, by their numbers."""

    count: int
    batch_size: int

    def __len__(self) -> int:
        return self.count

    def samples(self, step: int) -> int:
        """The samples of `step` over all ranks."""
        return self.batch_size

    def batches(self, first: int, steps: int) -> Iterator[int]:
        """The numbers of `steps` steps, the first of which is step `first`."""
        return iter(range(first, first + steps))


@dataclass(frozen=True)
class ValidationBatchKeys:
    """The keys of a rank's `shares` of each validation batch, of which there are `total`. All ranks have the same
    number of batches."""

    samples: int
    batch_size: int
    shares: Sequence[int]
    total: int

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size) * len(self.shares)

    def indices(self, batch: int, number: int = 0) -> range:
        """The sample indices of this rank's share `number` of `batch`, which may be empty."""
        start = batch * self.batch_size
        count = min(self.batch_size, self.samples - start)
        share = self.shares[number]
        return range(start + count * share // self.total, start + count * (share + 1) // self.total)

    def __iter__(self) -> Iterator[BatchKey]:
        for position in range(len(self)):
            indices = self.indices(*divmod(position, len(self.shares)))
            indices = indices or range(1)  # empty: one sample that does not count
            yield VALIDATION, numpy.arange(indices.start, indices.stop)


BatchKey = tuple[int, Indices | Sequence[int]]  # epoch, sample indices
# The most batches, and the most bytes, that are fetched together.
BLOCK, BLOCK_BYTES = 256, 4 << 20
ALIGNED = 64  # bytes: torch's tensors in the CPU's memory begin at a multiple of this


class MemoryBatches:
    """Batches of a data set in memory, indexed on the device without loading single samples. On a CPU small batches are
    fetched many at a time: a call that fetches one takes longer than the copy."""

    def __init__(self, dataset: Any, seed: int, keys: Iterable[BatchKey], device: torch.device) -> None:
        self.dataset = dataset
        self.seed = seed
        self.keys = keys
        self.device = device
        self.tensors = [tensor.to(device) for tensor in dataset.tensors]

    def __iter__(self) -> Iterator[list[Tensor]]:
        for epoch, parts in self._blocks():
            rows = torch.from_numpy(numpy.concatenate(parts) if len(parts) > 1 else parts[0])
            if self.device.type == "cuda":
                rows = rows.pin_memory().to(self.device, non_blocking=True)
            count = len(parts[0])
            draws = self.dataset.draws(self.seed, epoch, self.device) if isinstance(self.dataset, Images) else None
            columns = [tensor.index_select(0, rows).split(count) for tensor in self.tensors]
            for rows_of, *views in zip(rows.split(count), *columns):
                # .data: a change in place of one batch must not look to autograd like a change of another.
                batch = [view.data for view in views]
                if isinstance(self.dataset, Images):
                    batch[0] = self.dataset.resized_and_augmented(batch[0], None if draws is None else draws[rows_of])
                yield batch

    def _blocks(self) -> Iterator[tuple[int, list[Indices]]]:
        """The keys, those that are fetched together in one list: of one epoch, and with as many indices each."""
        keys = ((epoch, numpy.asarray(indices)) for epoch, indices in self.keys)
        for (epoch, count), run in groupby(keys, lambda key: (key[0], len(key[1]))):
            at_once = self._at_once(count)
            while parts := [indices for _, indices in islice(run, at_once)]:
                yield epoch, parts

    def _at_once(self, count: int) -> int:
        """How many batches of `count` samples to fetch together. Each begins where a tensor of its own could: a sum of
        products may round otherwise at another address."""
        sizes = [count * tensor.nbytes // max(1, len(tensor)) for tensor in self.tensors]
        if self.device.type != "cpu" or any(size % ALIGNED for size in sizes):
            return 1
        return max(1, min(BLOCK, BLOCK_BYTES // max(1, sum(sizes))))

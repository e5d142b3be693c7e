"""The order of samples and the seeds of every random draw, as pure functions: no state to save or to lose."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from laststep.config.errors import ConfigError

_64_BITS = 2**64 - 1
Indices = numpy.typing.NDArray[numpy.int64]  # of samples


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed computed from everything that a draw depends on, such as ("step", seed, step, rank)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def nth_seed(base: int, number: int) -> int:
    """The seed with this number in the series that starts at `base`, in a quarter of the time of `seed_of`.

    It is the mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): neighbours get unrelated seeds.
    """
    z = (base + number * 0x9E3779B97F4A7C15) & _64_BITS
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _64_BITS
    return (z ^ z >> 31) >> 1


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch on the CPU, and that of `device` if it is a GPU.

    torch.manual_seed is not used: it visits every backend and takes 80 times as long.
    """
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        gpu_generator(device).manual_seed(seed)


def gpu_generator(device: torch.device) -> torch.Generator:
    """torch's generator of a GPU. torch makes it when it first uses a GPU, and not before."""
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch on the CPU back, after a block, to where they were before it."""
    before = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


@dataclass(frozen=True)
class Order:
    """Which samples each step of a run uses, and which of them each rank.

    An epoch is a permutation of all samples, drawn from (seed, epoch) and cut into global batches, the last of which
    may be short. A rank's part of a batch depends only on the rank and the number of ranks, so a run that continues on
    another number of ranks still uses each remaining sample of the epoch exactly once. Steps are counted from 0, over
    all epochs.
    """

    samples: int
    batch_size: int
    seed: int
    drop_last: bool = False  # leave out a short last batch

    @classmethod
    def of(
        cls, samples: int, batch_size: int, seed: int, epoch_samples: int | None, overfit_batches: int | None = None
    ) -> Order:
        """The order of a data set of this size, in epochs of all samples, of `epoch_samples`, or of the samples of the
        first `overfit_batches` batches."""
        if overfit_batches is not None:
            return FewOrder(min(samples, overfit_batches * batch_size), batch_size, seed, whole=samples)
        if epoch_samples is None:
            return Order(samples, batch_size, seed)
        return PartOrder(epoch_samples, batch_size, seed, whole=samples)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Global batches per epoch, including a short last one unless `drop_last`."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def indices(self, epoch: int) -> Indices:
        """All samples of an epoch, in order."""
        return _permutation(self.samples, self.seed, epoch)

    def epoch(self, step: int) -> int:
        """The epoch of `step`, from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Indices:
        """The sample indices of the global batch of `step`: a view, not to be written to."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return self.indices(epoch)[number * self.batch_size : (number + 1) * self.batch_size]

    def count(self, step: int) -> int:
        """The number of samples in the global batch of `step`."""
        return min(self.batch_size, self.samples - step % self.steps_per_epoch * self.batch_size)

    def seen(self, steps: int) -> int:
        """The number of samples in the first `steps` global batches."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        in_epoch = min(self.samples, self.steps_per_epoch * self.batch_size)
        return epochs * in_epoch + min(in_epoch, rest * self.batch_size)

    def micro_batches(self, step: int, rank: int, size: int, accumulate: int) -> list[Indices]:
        """The sample indices of each of the rank's `accumulate` micro-batches in `step`: views, as of `batch`."""
        batch = self.batch(step)
        return [batch[start:stop] for start, stop in self._cuts(step, rank, size, accumulate)]

    def micro_batch_sizes(self, step: int, rank: int, size: int, accumulate: int) -> list[int]:
        """The number of samples in each of them. In a short batch the numbers may differ by one, or be 0."""
        return [stop - start for start, stop in self._cuts(step, rank, size, accumulate)]

    def _cuts(self, step: int, rank: int, size: int, accumulate: int) -> list[tuple[int, int]]:
        """Where each of the rank's micro-batches starts and stops within the global batch of `step`."""
        return _cuts(self.count(step), self.batch_size, rank, size, accumulate)


@dataclass(frozen=True)
class PartOrder(Order):
    """An order with epochs of `samples` samples, whatever the size of the data set: one epoch after the other takes the
    next part of a permutation of all `whole` samples, and then of the next permutation."""

    whole: int = 0

    def indices(self, epoch: int) -> Indices:
        """All samples of an epoch, in order."""
        return _part(self.whole, self.samples, self.seed, epoch)


@dataclass(frozen=True)
class FewOrder(Order):
    """An order of few of the `whole` samples, the same in each epoch: those with which an order of all begins."""

    whole: int = 0

    def indices(self, epoch: int) -> Indices:
        """All samples of an epoch, in order."""
        return _first(self.whole, self.samples, self.seed)[_permutation(self.samples, self.seed, epoch)]


@lru_cache(maxsize=1)
def _first(whole: int, samples: int, seed: int) -> Indices:
    return _permutation(whole, seed, 0)[:samples].copy()


@lru_cache(maxsize=256)  # of a rank's shares; all batches but the last of an epoch are cut alike
def _cuts(count: int, batch_size: int, rank: int, size: int, accumulate: int) -> list[tuple[int, int]]:
    parts = size * accumulate
    # Batch norm cannot train on a single sample, so a short batch fills fewer micro-batches, with at least two each.
    least = max(1, min(2, batch_size // parts))
    parts = max(1, min(parts, count // least))
    first = rank * accumulate
    cuts = [count * min(i, parts) // parts for i in range(first, first + accumulate + 1)]
    return list(pairwise(cuts))


@lru_cache(maxsize=2)  # the current epoch, and the next, which the loader may be prefetching
def _part(whole: int, samples: int, seed: int, epoch: int) -> Indices:
    parts, place, end = [], epoch * samples, (epoch + 1) * samples
    while place < end:
        number, start = divmod(place, whole)
        parts.append(_permutation(whole, seed, number)[start : start + end - place])
        place += len(parts[-1])
    return numpy.concatenate(parts)


@lru_cache(maxsize=2)  # the current epoch, and the next, which the loader may be prefetching
def _permutation(samples: int, seed: int, epoch: int) -> Indices:
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    # Slicing an array takes a tenth of the time of slicing a tensor.
    return torch.randperm(samples, generator=generator).numpy()


KEPT_EPOCHS = 2  # the current one, and the next, which the loader may be prefetching


@dataclass(frozen=True)
class SampledOrder(Order):
    """The order of a sampler: a sequence of indices, the same in each epoch, or an object that gives them anew in each.

    An object is iterated once per epoch, after `set_epoch(epoch)` if it has that, with the generators of Python, NumPy
    and torch seeded by (seed, epoch). So WeightedRandomSampler and the like need no state in a checkpoint.
    """

    sampler: Any = None
    _epochs: dict[int, Indices] = field(default_factory=dict, compare=False, repr=False)

    def indices(self, epoch: int) -> Indices:
        """All samples of an epoch, in order. Raises ConfigError when their number differs from that of other epochs."""
        if epoch not in self._epochs:
            while len(self._epochs) >= KEPT_EPOCHS:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = drawn = draw(self.sampler, self.seed, epoch)
            if len(drawn) != self.samples:
                raise _refused(f"it gave {self.samples} samples in one epoch and {len(drawn)} in another")
        return self._epochs[epoch]


def order_of(sampler: Any, dataset_size: int, batch_size: int, seed: int, drop_last: bool) -> SampledOrder:
    """The order of a sampler. Raises ConfigError for one whose order a resumed run could not repeat."""
    if getattr(sampler, "num_replicas", 1) != 1 or isinstance(sampler, DistributedSampler):  # torch's own, or alike
        raise _refused(
            f"a {type(sampler).__name__} gives one rank's share; run.loader(...) shares each batch out itself: leave "
            "the sampler out, or give one of the whole data set (num_replicas=1, rank=0)"
        )
    if getattr(sampler, "generator", None) is not None:
        raise _refused("its generator has a state that no checkpoint holds; make the sampler without one")
    indices = draw(sampler, seed, 0)
    if not numpy.array_equal(indices, draw(sampler, seed, 0)):
        raise _refused(
            "its order differs when it is asked twice; it must follow from set_epoch(epoch) and the generators of "
            "Python, NumPy and torch alone"
        )
    if not len(indices) or indices.min() < 0 or indices.max() >= dataset_size:
        raise _refused(f"it must give indices from 0 to {dataset_size - 1}")
    return SampledOrder(len(indices), batch_size, seed, drop_last, sampler)


def draw(sampler: Any, seed: int, epoch: int) -> Indices:
    """The indices of an epoch. Leaves the generators as they were."""
    if isinstance(sampler, (Sequence, Tensor, numpy.ndarray)):
        return numpy.asarray(sampler, dtype=numpy.int64)
    if not hasattr(sampler, "__iter__"):
        raise _refused("it must be a torch Sampler or a sequence of indices")
    with preserved_generators():
        seed_generators(seed_of("order", seed, epoch))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return torch.as_tensor([int(index) for index in sampler], dtype=torch.int64).numpy()


def _refused(why: str) -> ConfigError:
    return ConfigError(f"run.loader(sampler=...): {why}")


class OwnGenerators:
    """Generators of a custom loop's own, by name: seeded whenever the global ones are, each with numbers of its own. So
    nothing of them is saved."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[str, Any]] = {}
        self._last = 0

    def get(self, name: str, kind: str, device: torch.device) -> Any:
        """The generator of this name: "numpy" (numpy.random.Generator), "torch" (torch.Generator, on the device) or
        "python" (random.Random). Raises ConfigError."""
        makers: dict[str, Callable[[], Any]] = {
            "numpy": lambda: numpy.random.Generator(numpy.random.PCG64(0)),
            "torch": lambda: torch.Generator(device),
            "python": lambda: random.Random(0),
        }
        if kind not in makers:
            raise ConfigError(f"run.generator({name!r}, {kind!r}): must be 'numpy', 'torch' or 'python'")
        if name not in self._by_name:
            self._by_name[name] = (kind, makers[kind]())
            self._seed(name, self._last)
        known, generator = self._by_name[name]
        if known != kind:
            raise ConfigError(f"run.generator({name!r}, {kind!r}): this name is that of one of {known!r} already")
        return generator

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        self._last = seed
        for name in self._by_name:
            self._seed(name, seed)

    def _seed(self, name: str, seed: int) -> None:
        kind, generator = self._by_name[name]
        own = seed_of("generator", name, seed)
        if kind == "numpy":
            generator.bit_generator.state = numpy.random.PCG64(own).state
        else:
            generator.manual_seed(own) if kind == "torch" else generator.seed(own)

"""The order of samples and the seeds of every random draw, as pure functions: no state to save or to lose."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy
import numpy.typing
import torch

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
    def of(cls, samples: int, batch_size: int, seed: int, epoch_samples: int | None) -> Order:
        """The order of a data set of this size, in epochs of all samples or of `epoch_samples`."""
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

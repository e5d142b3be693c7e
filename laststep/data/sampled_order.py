"""The order of samples that a user's own sampler gives, as a pure function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from laststep.config.errors import ConfigError
from laststep.data.order import Indices, Order, preserved_generators, seed_generators, seed_of

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
    if isinstance(sampler, DistributedSampler):
        raise _refused(
            "a DistributedSampler gives one rank's share; run.loader(...) shares each batch out itself: leave the "
            "sampler out, or give the one that it wraps"
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

"""A sampler's order is repeated wherever an attempt starts, or the sampler is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from laststep.config.errors import ConfigError
from laststep.data.order import Order, order_of

DATA: Any = torch.arange(10)


class ByEpoch:
    """Starts at another sample in each epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + number) % 10 for number in range(6)])


class Repeated:
    """Written after torch's DistributedSampler, for repeated augmentation."""

    num_replicas, rank = 2, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


class Drifting:
    """Continues where it stopped."""

    def __init__(self) -> None:
        self._start = itertools.count()

    def __iter__(self) -> Iterator[int]:
        return iter([(next(self._start)) % 10, 1])


def batches(order: Order, steps: range) -> list[list[int]]:
    return [order.batch(step).tolist() for step in steps]


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(DATA), WeightedRandomSampler(DATA.tolist(), 7), SequentialSampler(DATA), ByEpoch(), [3, 1, 4], DATA],
)
def test_the_order_follows_from_the_step(sampler: Any) -> None:
    """Asked for in any order and by another process, and it leaves the generators of the training alone."""
    order = order_of(sampler, 10, 4, 7, drop_last=False)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    every = batches(order, range(8))
    again = order_of(sampler, 10, 4, 7, drop_last=False)
    assert every[5:] == batches(again, range(5, 8)) and every[1] == again.batch(1).tolist()
    assert torch.equal(torch.rand(2), expected)


def test_each_epoch_has_its_own_order() -> None:
    """As with torch's DataLoader, random samplers and those with set_epoch change, a list stays."""
    first, second = batches(order_of(ByEpoch(), 10, 6, 0, drop_last=False), range(2))
    assert first == [0, 1, 2, 3, 4, 5] and second == [1, 2, 3, 4, 5, 6]
    random = order_of(RandomSampler(DATA), 10, 10, 0, drop_last=False)
    assert random.batch(0).tolist() != random.batch(1).tolist()
    assert batches(order_of([3, 1, 4], 10, 2, 0, drop_last=True), range(3)) == [[3, 1]] * 3


def test_drop_last() -> None:
    """The short last batch is left out of every epoch; the next step begins the next epoch."""
    order, whole = Order(10, 4, 0, drop_last=True), Order(10, 4, 0)
    assert (order.steps_per_epoch, whole.steps_per_epoch) == (2, 3)
    assert batches(order, range(4)) == batches(whole, range(2)) + batches(whole, range(3, 5))
    assert [order.count(step) for step in range(4)] == [4] * 4


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (DistributedSampler(DATA, 2, 0), "leave the sampler out"),
        (Repeated(), "a Repeated gives one rank's share; run.loader(...) shares each batch out itself"),
        (RandomSampler(DATA, generator=torch.Generator()), "make the sampler without one"),
        (Drifting(), "its order differs when it is asked twice"),
        ([3, 10], "it must give indices from 0 to 9"),
        ([], "it must give indices from 0 to 9"),
        (7, "it must be a torch Sampler or a sequence of indices"),
        (numpy.array([-1]), "it must give indices from 0 to 9"),
    ],
)
def test_other_samplers_are_refused(sampler: Any, message: str) -> None:
    """A resumed run could not repeat their order, or would train on other samples than meant."""
    with pytest.raises(ConfigError, match=r"run\.loader\(sampler=\.\.\.\): .*") as caught:
        order_of(sampler, 10, 4, 0, drop_last=False)
    assert message in str(caught.value)

"""The order of samples: each sample exactly once per epoch, on any number of ranks and however often that changes.

A sample used twice or never would silently make a resumed run another experiment.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from laststep.data.loader import VALIDATION, BatchKey, LoaderFactory, TrainBatchKeys, ValidationBatchKeys
from laststep.data.order import Order, seed_generators, seed_of

ORDERS = st.builds(Order, st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**40))
SIZES = st.integers(1, 12)
MICRO_BATCHES = st.integers(1, 4)
CPU = torch.device("cpu")


def as_lists(keys: Iterable[BatchKey]) -> list[tuple[int, list[int]]]:
    """Keys that can be compared."""
    return [(epoch, numpy.asarray(indices).tolist()) for epoch, indices in keys]


def step_samples(order: Order, step: int, size: int, micro_batches: int) -> list[int]:
    """The samples that all ranks together use in one step."""
    return [
        i for rank in range(size) for indices in order.micro_batches(step, rank, size, micro_batches) for i in indices
    ]


@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 16))
def test_short_epochs_are_parts_of_a_pass(whole: int, part: int, batch_size: int) -> None:
    """Whatever `train.epoch_samples` is, each sample is used once in each pass, in the order that it has without."""
    order, passes = Order.of(whole, batch_size, 7, part), Order.of(whole, batch_size, 7, None)
    epochs = -(-2 * whole // part)
    drawn = [i for step in range(epochs * order.steps_per_epoch) for i in order.batch(step).tolist()]
    assert drawn[: 2 * whole] == [*passes.indices(0).tolist(), *passes.indices(1).tolist()]
    assert len(drawn) == order.seen(epochs * order.steps_per_epoch) == epochs * part
    assert order.seen(1) == order.count(0)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 16))
def test_few_batches_to_overfit(whole: int, batches: int, batch_size: int) -> None:
    """Each epoch has the samples with which the run would have begun, shuffled, each once."""
    order, all_samples = (Order.of(whole, batch_size, 7, None, few) for few in (batches, None))
    first = sorted(all_samples.indices(0)[: batches * batch_size].tolist())
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert sorted(i for step in steps for i in order.batch(step).tolist()) == first
    assert order.steps_per_epoch == min(batches, all_samples.steps_per_epoch)


@given(ORDERS, st.data())
def test_each_sample_once_an_epoch(order: Order, data: st.DataObject) -> None:
    """Even if each step of the epoch runs on a different number of ranks and micro-batches, as after many resumes."""
    epoch = data.draw(st.integers(0, 3))
    seen: list[int] = []
    for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
        size, micro_batches = data.draw(SIZES), data.draw(MICRO_BATCHES)
        taken = step_samples(order, step, size, micro_batches)
        assert taken == order.batch(step).tolist(), "the global batch does not depend on how it is divided"
        assert len(taken) == order.count(step)
        assert order.epoch(step) == epoch
        seen += taken
    assert sorted(seen) == list(range(order.samples))


@given(ORDERS, SIZES, MICRO_BATCHES, st.integers(0, 500))
def test_shares_are_even(order: Order, size: int, micro_batches: int, step: int) -> None:
    """Ranks wait for the one with most samples, so in a full batch all have the same number. Batch norm cannot train on
    one sample, so in a short batch a rank gets none if it cannot get two."""
    counts = [count for rank in range(size) for count in order.micro_batch_sizes(step, rank, size, micro_batches)]
    batches = [batch for rank in range(size) for batch in order.micro_batches(step, rank, size, micro_batches)]
    assert counts == list(map(len, batches))
    filled = [count for count in counts if count]
    assert max(filled) - min(filled) <= 1
    if order.count(step) == order.batch_size and order.batch_size % (size * micro_batches) == 0:
        assert len(set(counts)) == 1
    elif order.count(step) > 1 and order.batch_size >= 2 * size * micro_batches:
        assert min(filled) >= 2


@given(ORDERS, SIZES, MICRO_BATCHES, st.data())
def test_batches_from_any_step_on(order: Order, size: int, micro_batches: int, data: st.DataObject) -> None:
    """A resume at any step loads exactly the batches that an undisturbed run would load from there on."""
    steps = data.draw(st.integers(1, 2 * order.steps_per_epoch + 1))
    start = data.draw(st.integers(0, steps))
    rank = data.draw(st.integers(0, size - 1))
    whole = as_lists(TrainBatchKeys(order, range(steps), [rank], size, micro_batches))
    resumed = as_lists(TrainBatchKeys(order, range(start, steps), [rank], size, micro_batches))
    assert resumed == whole[start * micro_batches :]
    assert all(indices for _, indices in whole), "a model may not accept an empty batch"
    counts = [count for step in range(steps) for count in order.micro_batch_sizes(step, rank, size, micro_batches)]
    assert all(len(indices) == count for (_, indices), count in zip(whole, counts) if count)


@given(st.integers(1, 300), st.integers(1, 64), SIZES)
def test_validation_sees_each_sample_once(samples: int, batch_size: int, size: int) -> None:
    """A sample counted twice or not at all shifts the accuracy, and unequal numbers of batches make a rank hang."""
    ranks = [ValidationBatchKeys(samples, batch_size, [rank], size) for rank in range(size)]
    seen = [i for batches in ranks for number in range(len(batches)) for i in batches.indices(number)]
    assert sorted(seen) == list(range(samples))
    assert len({len(list(batches)) for batches in ranks}) == 1
    for batches in ranks:
        keys = as_lists(batches)
        assert all(indices for _, indices in keys) and {epoch for epoch, _ in keys} == {VALIDATION}


@given(ORDERS, st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_order_is_pure(order: Order, steps: list[int]) -> None:
    """The samples of a step do not depend on earlier queries: a resumed process has a different history."""
    first = [order.batch(step).tolist() for step in steps]
    anew = Order(order.samples, order.batch_size, order.seed)
    assert [anew.batch(step).tolist() for step in reversed(steps)] == first[::-1]


def test_epochs_and_seeds_differ() -> None:
    """The same order in every epoch learns worse, and the same order for every seed makes seeds useless."""
    epochs = {tuple(Order(50, 50, seed).batch(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(epochs) == 25


def test_seeds_are_frozen() -> None:
    """A newer version of Laststep must draw the same numbers when it resumes a run: these may never change."""
    assert [seed_of("step", 0, 1, 2), seed_of("order", 0, 0)] == [980990593667904004, 7453028512061360496]
    assert Order(10, 10, 0).batch(0).tolist() == [9, 3, 8, 5, 2, 7, 6, 0, 4, 1]


@given(st.lists(st.integers(0, 2**63) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4))
def test_seeds_fit(parts: list[int | str]) -> None:
    """Every generator accepts every seed."""
    assert 0 <= seed_of(*parts) < 2**63
    seed_generators(seed_of(*parts))


def test_generators_follow_the_seed() -> None:
    """The draws of Python, NumPy and torch repeat after the same seed: a user's Task may use any of them."""

    def draws() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    seed_generators(7)
    first = draws()
    assert draws() != first
    seed_generators(7)
    assert draws() == first


class Noise(Dataset[float]):
    """Samples that consist of random draws."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(numpy.random.random()) + float(torch.rand(()))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 20), st.integers(1, 4))
def test_draws_belong_to_the_sample(start: int, size: int) -> None:
    """Augmentation depends on seed, epoch and sample, but not on the rank or on what was loaded before."""
    order, loading = Order(20, 4, 3), LoaderFactory(list, workers=0, device=CPU)
    whole = [(order.epoch(step), order.batch(step).tolist()) for step in range(10)]
    drawn = {
        (epoch, index): value
        for (epoch, indices), values in zip(whole, loading.loader(Noise(), 3, whole))
        for index, value in zip(indices, values)
    }
    for rank in range(size):
        part = as_lists(TrainBatchKeys(order, range(start, 10), [rank], size, 1))
        for (epoch, indices), values in zip(part, loading.loader(Noise(), 3, part)):
            assert values == [drawn[epoch, index] for index in indices]
    assert len(set(drawn.values())) == 40


def test_workers_change_nothing() -> None:
    """The number of workers affects only the speed: samples and their draws stay the same."""
    batches = list(TrainBatchKeys(Order(20, 4, 3), range(7), [0], 2, 1))
    one, two = (list(LoaderFactory(list, workers=n, device=CPU).loader(Noise(), 3, batches)) for n in (0, 2))
    assert one == two

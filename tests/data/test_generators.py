"""A task is given the random numbers of its step, and cannot draw any others without an error."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from laststep.compat import generator_state as compat
from laststep.config.errors import ConfigError
from laststep.data.order import Generators, OwnGenerators, seed_generators

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "numpy": lambda: float(numpy.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("named", [("random", "numpy"), ("random",), ("numpy",), ()])
def test_the_draws_are_those_of_before(named: tuple[str, ...]) -> None:
    """A run from before a task named its draws continues with the same numbers."""
    generators, drawn = Generators(named, CPU, "mine"), [*named, "torch"]
    for seed in (5, 2**62 + 1):
        seed_generators(seed, CPU)
        expected = [DRAWS[name]() for name in drawn]
        generators.seed(seed)
        assert [DRAWS[name]() for name in drawn] == expected
        generators.check()


def test_a_gpu_that_nothing_has_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a GPU's generators when it first uses one. A rank may seed them before it has put anything there: it
    would end with an IndexError."""
    of_gpus = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "init", lambda: setattr(torch.cuda, "default_generators", of_gpus))
    seed_generators(5, torch.device("cuda", 1))
    assert of_gpus[1].initial_seed() == 5
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    Generators((), torch.device("cuda", 1), "mine").seed(7)
    assert of_gpus[1].initial_seed() == 7


@pytest.mark.parametrize("name", ["random", "numpy"])
@pytest.mark.parametrize("count", [1, 2, 311, 312, 624, 10_000])
def test_a_draw_that_is_not_named_is_found(name: str, count: int) -> None:
    """However many there are (the generators work in rounds of 624 words): such a run would resume otherwise."""
    generators = Generators({"random", "numpy"} - {name}, CPU, "mine")
    for _ in range(2):
        generators.seed(5)
        generators.check()
    for _ in range(count):
        DRAWS[name]()
    with pytest.raises(ConfigError, match=f"task=mine: it draws from the global generator of {name}, .*add '{name}'"):
        generators.check()
    generators.seed(5)
    generators.check()


def test_other_ways_to_move_a_generator() -> None:
    """NumPy's may be replaced, and both may be seeded by the task itself."""
    generators = Generators((), CPU, "mine")
    moves: list[Callable[[], object]] = [
        lambda: (random.seed(3), random.random()),
        lambda: (numpy.random.seed(3), numpy.random.rand()),
        lambda: numpy.random.shuffle([1, 2, 3]),
        lambda: random.shuffle([1, 2, 3]),
    ]
    for move in moves:
        generators.seed(5)
        move()
        with pytest.raises(ConfigError):
            generators.check()
    before = numpy.random.get_bit_generator()  # type: ignore[attr-defined, unused-ignore]
    generators.seed(5)
    numpy.random.set_bit_generator(numpy.random.MT19937(3))  # type: ignore[attr-defined, unused-ignore]
    try:
        with pytest.raises(ConfigError):
            generators.check()
    finally:
        numpy.random.set_bit_generator(before)  # type: ignore[attr-defined, unused-ignore]


def test_one_that_cannot_be_watched_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an interpreter that keeps its state elsewhere: a draw that is not named is no fault then, only slower."""
    monkeypatch.setattr(compat, "python_mark", lambda: None)
    generators = Generators((), CPU, "mine")
    drawn = []
    for _ in range(2):
        generators.seed(5)
        drawn.append(random.random())
        generators.check()
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("named", ["random", ("torch",), ("numpi",)])
def test_wrong_names(named: tuple[str, ...]) -> None:
    """A misspelt name would seed nothing."""
    with pytest.raises(ConfigError, match=r"task=mine: draws=.*must be a tuple with some of 'random' and 'numpy'"):
        Generators(named, CPU, "mine")


def test_own_generators() -> None:
    """What draws from one does not change another's numbers, nor the global ones'; the next step has others."""
    own, device = OwnGenerators(), torch.device("cpu")
    own.seed(1)
    made = {kind: own.get(kind, kind, device) for kind in ("numpy", "torch", "python")}

    def draw() -> list[float]:
        drawn = float(torch.rand((), generator=made["torch"]))
        return [float(made["numpy"].random()), drawn, made["python"].random()]

    first, more = draw(), draw()
    assert own.get("numpy", "numpy", device) is made["numpy"] and draw() not in (first, more)
    own.seed(2)
    assert draw() != first
    own.seed(1)
    made["numpy"].random(100)
    assert draw()[1:] == first[1:]
    own.seed(1)
    assert [draw(), draw()] == [first, more]
    for name, kind, message in (("x", "cuda", "must be 'numpy', 'torch' or 'python'"), ("torch", "numpy", "this name")):
        with pytest.raises(ConfigError, match=message):
            own.get(name, kind, device)

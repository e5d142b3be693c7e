"""State of any kind: what goes into a checkpoint comes back, into the objects that the loop uses."""

from __future__ import annotations

import datetime
import io
import pickle
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD

from laststep.checkpoint.pack import Packed, map_tensors, serialized_structure
from laststep.config.errors import ConfigError
from laststep.loops.kinds import Unstorable, changes_in_place, decode, encode
from laststep.loops.registered import Registered
from laststep.ranks.group import Group
from tests.support.records import a_world


class Colour(Enum):
    """An enum."""

    RED = 1
    BLUE = "b"


class Move(NamedTuple):
    """A tuple with names."""

    reward: float
    seen: Any


@dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be changed."""

    width: int
    names: list[str] = field(default_factory=list)


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("left", "right")

    def __init__(self) -> None:
        self.left, self.right = 1, [2]


class Game:
    """An object of the user's, with a part that is used in two places, and one that refers back."""

    def __init__(self, seed: int) -> None:
        self.np_random = numpy.random.default_rng(seed)
        self.envs = [self, {"rng": self.np_random, "board": numpy.zeros((2, 3))}]
        self.best: Any = None


class Items(list):  # type: ignore[type-arg]
    """A list with a class of its own."""


VALUES = [
    numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
    numpy.arange(10)[::-2],
    numpy.array(3.5),
    numpy.empty((0, 4)),
    numpy.array([True, False]),
    numpy.array(["ab", "c"]),
    numpy.array([1, 2], dtype=">i4"),
    numpy.array(["2026-01-01"], dtype="datetime64[D]"),
    numpy.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    numpy.array([None, "x", {"y": 1}], dtype=object),
    numpy.float64(0.1),
    numpy.int64(-3),
    numpy.bool_(True),
    numpy.datetime64("2026-01-01"),
    numpy.dtype("float32"),
    (1, (2.0, "x"), [None, True]),
    Move(1.0, numpy.ones(2)),
    Colour.BLUE,
    Frozen(3, ["a"]),
    deque([1, Colour.RED], maxlen=5),
    {1, "a", (2, 3)},
    frozenset({Colour.RED}),
    OrderedDict(b=1, a=2),
    Counter("hello"),
    defaultdict(list, x=[1]),
    {(1, 2): "tuple", 3: "number", Colour.RED: "enum", numpy.int64(4): "array"},
    {"laststep.kind": "not ours"},
    pickle.dumps({"x": Frozen(1)}),
    bytes(range(256)) * 20,
    bytearray(b"abc"),
    b"",
    range(2, 9, 3),
    Path("a/b"),
    datetime.datetime(2026, 1, 2, 3, 4),
    datetime.timedelta(days=2, seconds=3),
    Frozen,
    len,
    Items([1, 2]),
    2**130,
    complex(1, 2),
]


def stored(value: Any, live: Any = None) -> Any:
    """The value after a checkpoint: only tensors, and what torch loads from an untrusted file."""
    encoded = encode(value, "value", copies=True)
    tensors: list[torch.Tensor] = []
    map_tensors(encoded, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    structure = torch.load(io.BytesIO(serialized_structure(Packed(encoded).structure)), weights_only=True)
    left = iter(tensors)
    return decode(map_tensors(structure, lambda _: next(left)), live, "value")


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, numpy.ndarray):
        flags = one.flags.f_contiguous == other.flags.f_contiguous or one.ndim < 2
        return flags and one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_comes_back(value: Any) -> None:
    """A type that came back as another (a tuple as a list, NumPy's number as Python's) could change later steps."""
    assert same(stored(value), value)
    assert same(stored({"nested": [value]}), {"nested": [value]})


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(3),
        lambda: numpy.random.default_rng(3),
        lambda: numpy.random.Generator(numpy.random.MT19937(3)),
        lambda: numpy.random.RandomState(3),
        lambda: torch.Generator().manual_seed(3),
    ],
)
def test_generators(make: Any) -> None:
    """They continue with the number that would have come next, in the very object that the loop draws from."""

    def draw(generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return torch.rand(2, generator=generator).tolist()
        return [generator.random() for _ in range(2)]

    generator, live = make(), make()
    draw(generator)
    draw(live), draw(live)
    state = {"rng": live}
    found = stored({"rng": generator}, state)
    fresh = stored({"rng": generator})
    expected = draw(generator)
    assert found is state and found["rng"] is live and draw(live) == expected
    assert fresh["rng"] is not generator and draw(fresh["rng"]) == expected


def test_in_place() -> None:
    """What the loop holds elsewhere under another name is restored too: its arrays, its generators, its own objects."""
    game, live = Game(1), Game(2)
    game.np_random.random()
    game.envs[1]["board"][:] = 7  # type: ignore[index]
    game.best = deque([Frozen(1)])
    board, rng, envs = live.envs[1]["board"], live.np_random, live.envs  # type: ignore[index]
    assert changes_in_place(live)
    assert stored(game, live) is live
    assert live.envs is envs and live.envs[0] is live and live.np_random is rng
    assert live.envs[1]["rng"] is rng and (board == 7).all()  # type: ignore[index]
    assert rng.random() == game.np_random.random() and live.best == deque([Frozen(1)])
    del game.best
    game.new = 1  # type: ignore[attr-defined]
    assert not hasattr(stored(game, live), "best") and live.new == 1  # type: ignore[attr-defined]


def test_one_that_was_two() -> None:
    """Two arrays that begin as one object, such as the best weights and the last, do not overwrite each other."""
    start = numpy.zeros(2)
    live = {"best": start, "last": start}
    stored({"best": numpy.ones(2), "last": numpy.full(2, 2.0)}, live)
    assert live["best"].tolist() == [1, 1] and live["last"].tolist() == [2, 2]


def test_one_in_two_places() -> None:
    """A generator that two parts share is still one."""
    rng = random.Random(1)
    found = stored({"a": rng, "b": [rng]})
    assert found["a"] is found["b"][0]


def test_slots() -> None:
    """They are state as well."""
    value, live = Slotted(), Slotted()
    value.left, value.right = 5, [6]
    stored(value, live)
    assert (live.left, live.right) == (5, [6])


def test_copies() -> None:
    """The state of a step must not change with the next step, which a rescue may interrupt."""
    array, tensor, items = numpy.zeros(2), torch.zeros(2), [1]
    encoded = encode({"a": array, "t": tensor, "i": items}, "x", copies=True)
    array += 1
    tensor += 1
    items.append(2)
    found = decode(encoded)
    assert not found["a"].any() and not found["t"].any() and found["i"] == [1]


@pytest.mark.parametrize(
    ("put", "path"),
    [
        (lambda game: game.envs[1].update(lock=threading.Lock()), r"game.envs\[1\]\['lock'\] is a _thread.lock"),
        (lambda game: setattr(game, "file", io.TextIOWrapper(io.BytesIO())), r"game.file is a _io.TextIOWrapper"),
        (lambda game: setattr(game, "more", (n for n in range(3))), r"game.more is a builtins.generator"),
        (lambda game: game.envs.append([1, {2: iter({})}]), r"game.envs\[2\]\[1\]\[2\] is a builtins.dict_keyiterator"),
    ],
)
def test_what_cannot_be_stored(put: Any, path: str) -> None:
    """The user learns which part it is, and the way out, before the first step."""
    game = Game(1)
    put(game)
    with pytest.raises(Unstorable, match=f"^{path}, which no checkpoint can hold .*: leave it out, or give the object"):
        encode(game, "game")


def test_contains_itself() -> None:
    """It would be followed without end."""
    items: list[Any] = []
    items.append([items])
    with pytest.raises(Unstorable, match=r"x\[0\]\[0\] contains itself"):
        encode(items, "x")


def test_runs_nothing_from_the_checkpoint() -> None:
    """A checkpoint names classes: none is imported, and none of Python's own is made from it."""
    imported = {"laststep.kind": "object", "class": "nowhere:That", "number": 0, "attributes": {}}
    with pytest.raises(Unstorable, match="which the program has not defined"):
        decode(imported)
    with pytest.raises(Unstorable, match="make this Popen before"):
        decode({**imported, "class": "subprocess:Popen"})


def registered(**objects: Any) -> Registered:
    """These objects and an optimizer, registered."""
    model = nn.Linear(1, 1)
    group = Group(a_world(), torch.distributed.HashStore(), torch.device("cpu"))
    return Registered({**objects, "optimizer": SGD(model.parameters(), lr=numpy.float64(0.1))}, group, torch.zeros(1))


def test_registered() -> None:
    """Anything that can be changed in place can be registered itself; anything else goes into a dict."""
    found = registered(rng=random.Random(1), game=Game(1), seen=deque([1]), table=numpy.zeros(3), best={"loss": 1.0})
    assert serialized_structure(Packed(found.state()).structure)
    for value in (0.5, "name", (1, 2)):
        with pytest.raises(ConfigError, match=r"run.restore\(best=...\): a .* is no dict: keep it in a dict"):
            registered(best=value)

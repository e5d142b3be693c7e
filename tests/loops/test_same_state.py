"""The comparison of a state over ranks: any difference is found, and named."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from laststep.loops.digest import difference_between_ranks
from laststep.ranks.group import Group
from laststep.ranks.seal import Seal
from tests.support.records import a_world
from tests.support.states import places, pretended_rank, sharded

STATE: dict[str, Any] = {
    "model": {"weight": torch.randn(3, 4), "count": torch.tensor(3), "mask": torch.tensor([True, False])},
    "optimizer": {
        "state": {0: {"step": torch.tensor(2.0), "half": torch.ones(2, dtype=torch.bfloat16)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
    },
    "best": {"loss": float("nan"), "name": "a"},
    "odd": {"small": torch.ones(2).to(torch.float8_e4m3fn), "complex": torch.ones(1) * 1j},
    "empty": torch.empty(0),
    "numpy": numpy.arange(3.0),
    "objects": numpy.array([print, None]),
}


def compared(*states: Any, shards: int = 1) -> list[Any]:
    """The difference that each of these ranks finds."""
    store, seal, found = dist.HashStore(), Seal(), [None] * len(states)
    gathered: list[Any] = [None] * len(states)
    barrier = threading.Barrier(len(states))

    def rank(number: int) -> None:
        group = Group(a_world(number, len(states)), store, torch.device("cpu"), "gloo", seal=seal)

        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            gathered[number] = tensor
            barrier.wait(30)
            return gathered

        group.gather = gather  # type: ignore[method-assign]
        found[number] = difference_between_ranks(states[number], group, shards)  # type: ignore[assignment]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_the_same_state() -> None:
    """Equal values in other objects and other memory are the same."""
    assert compared(STATE, copy.deepcopy(STATE), copy.deepcopy(STATE)) == [None] * 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.weight", torch.zeros(3, 4)),
        ("model.weight", torch.ones(4, 3)),
        ("model.count", torch.tensor(4)),
        ("model.mask", torch.tensor([False, False])),
        ("optimizer.state.0.step", torch.tensor(3.0)),
        ("optimizer.state.0.half", torch.zeros(2, dtype=torch.bfloat16)),
        ("optimizer.param_groups.0.lr", 0.10000000000000002),
        ("best.loss", 0.5),
        ("best.name", "b"),
        ("odd.small", torch.zeros(2).to(torch.float8_e4m3fn)),
        ("odd.complex", torch.ones(1) * 2j),
        ("best.more", 1),
        ("numpy", numpy.zeros(3)),
    ],
)
def test_a_difference_is_named(path: str, value: object) -> None:
    """All ranks say the same, the object and the value in it, and which ranks have another one than rank 0."""
    other = copy.deepcopy(STATE)
    *parents, last = path.split(".")
    place: Any = other
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    assert compared(STATE, copy.deepcopy(STATE), other) == [f"{path} (rank 2 against rank 0)"] * 3


def test_many_differences() -> None:
    """The first few are named. Equal values in another order would be mixed up in a checkpoint, too."""
    others = {f"value {number}": number + 1 for number in range(5)}
    (found, _) = compared({name: 0 for name in others}, others)
    assert found == "value 0, value 1, value 2 and 2 more (rank 1 against rank 0)"
    (found, _) = compared({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert found == "the order of its names (rank 1 against rank 0)"


def test_shards_are_compared_with_their_replicas() -> None:
    """Shards differ; two replicas of one must not, since each writes a part of it. What is not sharded is the same on
    all ranks."""
    weight = torch.randn(5, 2)
    with pretended_rank(places(2, 2)[0]) as mesh:
        states = [{"weight": sharded(weight, place, mesh), "best": 1} for place in places(2, 2)]
        assert compared(*states, shards=2) == [None] * 4
        states[3]["weight"] = sharded(weight + 1, places(2, 2)[3], mesh)
        assert compared(*states, shards=2) == ["weight (rank 3 against the first replica of the shard)"] * 4
        states[1]["best"] = 2
        assert compared(*states, shards=2)[0] == "best, weight (rank 1, 3 against the first replica of the shard)"

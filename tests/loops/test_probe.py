"""What a probe notes: digests that differ exactly when bits do, and the variables that a user may have forgotten."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy
import torch
from torch import nn

from laststep.loops.digest import digest, digests
from laststep.loops.probe import Variables


def test_digests_see_every_bit() -> None:
    """A proof that misses a bit, a type or a shape would call a script exact that is not."""
    zero = torch.zeros(2)
    different = [zero, -zero, zero.double(), zero.view(1, 2), zero.int(), torch.zeros(3), [zero], {"a": zero}]
    different += [numpy.zeros(2), 0, 0.0, "0", None, False, (1, 2), (12,), {"a": 1}, {"b": 1}]
    assert len({digest(each) for each in different}) == len(different)
    assert digest(float("nan")) == digest(float("nan"))


def test_digests_see_only_bits() -> None:
    """Neither the layout in memory nor the address of an object may look like a difference between two runs."""
    table = torch.arange(6.0).view(2, 3)
    assert digest(table.t()) == digest(table.t().contiguous())
    assert digest(torch.complex(table, table).conj()) == digest(torch.complex(table, -table))
    assert digest(object()) == digest(object())
    for odd in (table.to_sparse(), table.bfloat16(), torch.zeros(()), torch.empty(0), torch.ones(2, dtype=torch.bool)):
        assert len(digest(odd)) == 16


def test_names_in_a_state() -> None:
    """A user looks for the tensor by its name."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = set(digests({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert {"model.weight", "model.bias", "optimizer.param_groups.0.lr"} <= names


class Odd:
    """An object of the user's that cannot be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


class Mine:
    """An object of the user's."""

    def __init__(self) -> None:
        self.best, self.noise, self.itself = 0.5, numpy.random.default_rng(0), self


shared = random.Random(0)


def draw() -> float:
    """Uses a global generator."""
    return shared.random()


def a_loop(registered: nn.Module) -> dict[str, Any]:
    """A user's function, within its loop; returns what is found of it."""
    average, generator, batches = 1.0, torch.Generator(), itertools.count()
    mine, weights, odd, history, draws = Mine(), registered.weight, Odd(), [1, 2], draw
    teacher = nn.Linear(1, 1)
    variables = Variables()
    variables.leave_out(registered)
    found = dict(variables.of_callers())
    del average, generator, batches, mine, weights, odd, history, draws, teacher
    return found


def test_variables_of_the_users_code() -> None:
    """The names that a report gives: local and global ones, in containers and objects, but nothing registered."""
    found = a_loop(nn.Linear(3, 1))
    kinds = {name: variable["kind"] for name, variable in found.items()}
    assert kinds["average"] == kinds["mine.best"] == kinds["history[0]"] == "number"
    assert kinds["teacher"] == "value"
    assert kinds["generator"] == kinds["mine.noise"] == kinds["shared"] == "generator"
    assert kinds["batches"] == "iterator"
    assert not {"registered", "weights"} & set(kinds)
    assert a_loop(nn.Linear(3, 1))["average"] == found["average"]

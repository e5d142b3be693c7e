"""The random numbers of a step depend on its seed alone."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from laststep.data.order import seed_generators


@pytest.mark.parametrize("seed", [5, 2**62 + 1])
def test_all_generators_are_seeded(seed: int) -> None:
    """A resumed run would draw other numbers from one that is left out."""
    drawn = []
    for _ in range(2):
        seed_generators(seed, torch.device("cpu"))
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_a_gpu_that_nothing_has_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a GPU's generators when it first uses one. A rank may seed them before it has put anything there: it
    would end with an IndexError."""
    of_gpus = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "init", lambda: setattr(torch.cuda, "default_generators", of_gpus))
    seed_generators(5, torch.device("cuda", 1))
    assert of_gpus[1].initial_seed() == 5

"""The random numbers of a step depend on its seed alone."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from laststep.config.errors import ConfigError
from laststep.data.order import OwnGenerators, seed_generators


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

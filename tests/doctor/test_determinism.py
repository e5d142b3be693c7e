"""What doctor says about the cost of train.deterministic, measured on the CPU in place of a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from laststep.cli import doctor
from laststep.doctor import diagnosis

CPU = torch.device("cpu")


def kernels() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark


def test_the_two_kinds_of_kernels_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio of two equal measurements would say that determinism costs nothing. The settings of the process are back
    afterwards: doctor's other checks use torch too."""
    before, seen = kernels(), []

    def took(step: object) -> float:
        seen.append(kernels())
        return 3.0 if seen[-1] == (True, False) else 2.0

    monkeypatch.setattr(diagnosis, "_time", took)
    assert diagnosis.costs(CPU, 0.03) == dict.fromkeys(("convolution", "attention", "embedding"), 1.5)
    assert {*seen} == {(True, False), (False, True)}
    assert kernels() == before
    monkeypatch.setattr(diagnosis, "costs", lambda device, scale: {"convolution": 1.25, "attention": 0.999})
    assert diagnosis.describe_cost(CPU).startswith("costs +25% (convolution), -0% (attention); `python -m ")


def test_each_layer_has_a_deterministic_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is run both ways, forward and backward."""
    monkeypatch.setattr(diagnosis, "TURNS", 1)
    monkeypatch.setattr(diagnosis, "STEPS", 1)
    assert all(ratio > 0 for ratio in diagnosis.costs(CPU, 0.03).values())


def test_a_gpu_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor reports all else, and says what to run instead."""

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nMore lines")

    monkeypatch.setattr(diagnosis, "costs", full)
    line = diagnosis.describe_cost(CPU)
    assert line.startswith("what it costs could not be measured (CUDA out of memory. Tried to allocate 20.00 MiB); `py")


@pytest.mark.parametrize("gpus", [0, 1])
def test_it_is_shown_where_there_is_a_gpu(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It concerns no other machine."""
    properties = SimpleNamespace(name="H200", total_memory=2**37, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(diagnosis, "describe_cost", lambda device: f"costs nothing on {device}")
    shown = dict(doctor._machine())
    assert shown.get("deterministic") == ("costs nothing on cuda:0" if gpus else None)

"""Buffers stay where they are in memory, whatever a forward pass puts in their place.

A rescue and the other ranks look there; elsewhere they would find the values of another step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.worlds import a_world
from trainer.config.errors import ConfigError
from trainer.loops.buffers import Buffers
from trainer.world.group import Group


class Mean(nn.Module):
    """Has one buffer."""

    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))


def buffers_of(model: nn.Module) -> Buffers:
    return Buffers(model, Group(a_world(), dist.HashStore(), torch.device("cpu")))


def replace(model: Mean, value: Tensor) -> None:
    model.mean = value


def is_home(model: Mean, home: Tensor | None, value: float) -> bool:
    """Whether the model has its buffer again, with this value in it."""
    return model.mean is home is not None and torch.equal(home, torch.full((3,), value))


def move(model: Mean, value: Tensor) -> None:
    assert model.mean is not None
    model.mean.data = value


@pytest.mark.parametrize("change", [replace, move])
def test_another_tensor_in_a_buffers_place(change: Callable[[Mean, Tensor], None]) -> None:
    """Its values are committed, and the buffer is back. While a step is under way, the state is that before it; where a
    step begins anew, so is the model."""
    model = nn.Sequential(Mean())
    (mean,) = (part for part in model if isinstance(part, Mean))
    buffer, buffers = mean.mean, buffers_of(model)
    change(mean, torch.ones(3))
    buffers.broadcast()
    buffers.commit()
    assert is_home(mean, buffer, 1.0)
    change(mean, torch.full((3,), 2.0))
    state = buffers.in_state_dict(model.state_dict(keep_vars=True), buffers.committed)
    assert torch.equal(state["0.mean"], torch.ones(3)), "of the last finished step"
    buffers.rewind()
    assert is_home(mean, buffer, 1.0)
    change(mean, torch.full((3,), 3.0))
    buffers.rewind()
    assert is_home(mean, buffer, 1.0), "in each share"


@pytest.mark.parametrize(
    ("change", "became"),
    [
        (lambda model: replace(model, torch.ones(4)), "float32 [4] on cpu"),
        (lambda model: move(model, torch.ones(4)), "float32 [4] on cpu"),
        (lambda model: model.mean.resize_(5), "float32 [5] on cpu"),
        (lambda model: replace(model, torch.ones(3, dtype=torch.float64)), "float64 [3] on cpu"),
        (lambda model: setattr(model, "mean", None), "None"),
    ],
)
def test_a_buffer_of_another_size(change: Callable[[Mean], None], became: str) -> None:
    """As of torch's observers for quantisation. A checkpoint would hold what lies beside the old one in memory."""
    model = Mean()
    buffers = buffers_of(model)
    change(model)
    with pytest.raises(ConfigError) as error:
        buffers.broadcast()
    assert str(error.value).startswith(
        f"the model's buffer mean was float32 [3] on cpu, and a step has made it {became},"
    )

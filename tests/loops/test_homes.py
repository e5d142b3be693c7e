"""Buffers stay where they are in memory, whatever a forward pass puts in their place.

A rescue and the other ranks look there; elsewhere they would find the values of another step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laststep.config.errors import ConfigError
from laststep.loops.snapshot import Buffers
from laststep.ranks.group import Group
from tests.support.records import a_world


class Mean(nn.Module):
    """Has one buffer."""

    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))


class TwoMeans(nn.Module):
    """Has two buffers."""

    first: Tensor
    second: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.full((3,), 2.0))


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


def test_buffers_that_change_places() -> None:
    """Each has the values that the step has given it, though both are in the memory of before."""
    model = TwoMeans()
    buffers = buffers_of(model)
    model.first, model.second = torch.ones(3), model.first
    buffers.broadcast()
    buffers.commit()
    assert (model.first.tolist(), model.second.tolist()) == ([1] * 3, [0] * 3)
    model.second = model.first
    state = buffers.in_state_dict(model.state_dict(keep_vars=True), buffers.committed)
    assert (state["first"].tolist(), state["second"].tolist()) == ([1] * 3, [0] * 3)


def test_one_tensor_in_two_places() -> None:
    """A step would leave two, and the memory has room for one."""
    model = TwoMeans()
    model.second = model.first
    buffers = buffers_of(model)
    model.second = torch.ones(3)
    with pytest.raises(ConfigError, match=r"^the model's buffer second is one tensor with another buffer, and"):
        buffers.broadcast()


def test_buffers_that_no_checkpoint_holds() -> None:
    """Such as a cache that grows: they are not looked after."""
    model = Mean()
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    buffers = buffers_of(model)
    model.cache = torch.ones(5)
    buffers.broadcast()
    assert torch.equal(model.cache, torch.ones(5))


def test_a_model_that_is_moved() -> None:
    """As Lightning moves it to the CPU before the last save: what it was is still in its place."""
    model = Mean()
    buffers = buffers_of(model)
    replace(model, torch.empty(3, device="meta"))
    buffers.broadcast()
    buffers.commit()
    assert model.mean is not None and model.mean.device.type == "meta"
    state = buffers.in_state_dict(model.state_dict(keep_vars=True), buffers.committed)
    assert torch.equal(state["mean"], torch.zeros(3))


def test_another_type() -> None:
    """It is rounded to the buffer's, in each step of each attempt."""
    model = Mean()
    buffers = buffers_of(model)
    replace(model, torch.full((3,), 0.1, dtype=torch.float64))
    buffers.broadcast()
    assert model.mean is not None and torch.equal(model.mean, torch.full((3,), 0.1))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model() -> None:
    """It keeps its buffers in another kind of dictionary."""
    model = torch.jit.script(nn.BatchNorm1d(2))
    buffers = buffers_of(model)
    model(torch.randn(4, 2))
    buffers.broadcast()
    buffers.commit()
    state = buffers.in_state_dict(model.state_dict(keep_vars=True), buffers.committed)
    assert torch.equal(state["running_mean"], model.running_mean) and int(state["num_batches_tracked"]) == 1


@pytest.mark.parametrize(
    ("change", "became"),
    [
        (lambda model: replace(model, torch.ones(4)), "of shape (4,)"),
        (lambda model: move(model, torch.ones(4)), "of shape (4,)"),
        (lambda model: model.mean.resize_(5), "of shape (5,)"),
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
    said = f"the model's buffer mean was of shape (3,), and a step has made it {became}, which no checkpoint can follow"
    assert str(error.value).startswith(said)

"""The moving average is torch's, bit for bit, but never waits for the device."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from laststep.loops.learner import Average


def a_model(device: str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16()).to(device)


def change(model: nn.Module) -> None:
    """What a step does: weights and buffers change."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(torch.rand(tensor.shape).to(tensor.dtype) if tensor.is_floating_point() else 3)


def test_it_is_torchs_average_bit_for_bit() -> None:
    """Runs that began with torch's class continue with ours: one state fits the other, and the values are the same."""
    torch.manual_seed(1)
    model = a_model()
    ours = Average(model, 0.9, torch.device("cpu"))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        for _ in range(3):
            change(model)
            ours.update_parameters(model)
            theirs.update_parameters(model)
            pairs = zip(ours.state_dict().items(), theirs.state_dict().items())
            assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)
        restored = Average(model, 0.9, torch.device("cpu"))
        restored.load_state_dict(theirs.state_dict())
        ours = restored


def test_it_never_reads_from_the_device() -> None:
    """A meta tensor has no value that the CPU could read: torch's own class fails here at its first update."""
    model = a_model("meta")
    average = Average(model, 0.9, torch.device("meta"))
    for _ in range(3):
        average.update_parameters(model)
    assert {tensor.device.type for tensor in average.state_dict().values()} == {"meta"}

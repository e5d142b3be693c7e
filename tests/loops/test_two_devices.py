"""The state of one run may be on two devices: AdamW's `step` and the counter of torch's AveragedModel are on the CPU,
the rest is on a GPU. The meta device stands in for the GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel

from laststep.loops.digest import FingerprintedState
from laststep.loops.snapshot import Buffers, OptimizerSnapshot
from laststep.ranks.group import Group
from tests.support.records import a_world


def test_a_fingerprint() -> None:
    """Otherwise every custom loop with AdamW on a GPU would fail at its first epoch's end."""
    step, weight = torch.tensor(3.0), torch.empty(4, device="meta")
    state = FingerprintedState({"step": step, "weight": weight, "more": torch.ones(2)})
    assert [hashes.device.type for hashes in state._fingerprint()[1]] == ["cpu", "meta"]
    step += 1
    assert not state.unchanged()


def test_the_counter_of_an_averaged_model() -> None:
    """The ranks cannot send it to each other by NCCL, nor put it into one row with the other buffers."""
    model = nn.BatchNorm1d(2, device="meta")
    average = AveragedModel(model)
    buffers = Buffers(nn.ModuleList([model, average]), Group(a_world(), dist.HashStore(), torch.device("meta")))
    average.n_averaged += 5
    buffers.broadcast()
    buffers.commit()
    committed = buffers.committed
    average.n_averaged += 1
    state = buffers.in_state_dict(average.state_dict(keep_vars=True), committed)
    assert state["n_averaged"] == 5 and state["module.running_mean"].device.type == "meta"


def test_an_optimisers_state_stays_what_it_was() -> None:
    """What the CPU changes is copied: rates and counters. What the device changes is not. The format is torch's."""
    model = nn.Linear(2, 1)
    first, second = AdamW(model.parameters(), lr=0.1, foreach=True), SGD(model.parameters(), lr=0.2, momentum=0.9)
    for optimizer in (first, second):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        expected = optimizer.state_dict()
        counters = [float(values["step"]) for values in expected["state"].values() if "step" in values]
        held = OptimizerSnapshot(optimizer, on_host=lambda tensor: tensor.ndim == 0)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        found = held.state_dict()
        assert list(found["param_groups"][0]) == list(expected["param_groups"][0])
        assert found["param_groups"][0]["lr"] in (0.1, 0.2) and found["param_groups"][0]["params"] == [0, 1]
        assert [float(values["step"]) for values in found["state"].values() if "step" in values] == counters
        for number, values in found["state"].items():
            live = optimizer.state_dict()["state"][number]
            assert all(live[name] is value for name, value in values.items() if value.ndim)


def test_an_optimiser_that_replaces_its_tensors() -> None:
    """Some make a new tensor in each step instead of changing the old one. The held state has the old one."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    held = OptimizerSnapshot(optimizer, on_host=lambda tensor: False)
    before = optimizer.state[model.weight]["momentum_buffer"]
    optimizer.state[model.weight]["momentum_buffer"] = before * 2
    assert held.state_dict()["state"][0]["momentum_buffer"] is before

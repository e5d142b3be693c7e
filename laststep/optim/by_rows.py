"""Finds out whether an optimiser updates each row of a parameter by itself, so that ranks may hold different rows.

SGD and Adam do, LAMB, Adafactor, Muon and Shampoo do not, and the name of a user's class says nothing. So the optimiser
is tried: on a small matrix, and on each half of it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ROWS, COLUMNS = 8, 6
STEPS = 3  # the first step of some optimisers is different


def needs_other_rows(optimizer: Optimizer) -> bool:
    """Whether what the optimiser does to a row depends on other rows. False for one that cannot be tried."""
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    values = torch.linspace(-1, 2, ROWS * COLUMNS, device=device).view(ROWS, COLUMNS)
    parts = (values, values, *values.split(ROWS // 2))
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            (whole, only_rows), (again, _), *halves = (_tried(optimizer, part) for part in parts)
    except Exception:  # it may keep something for each parameter that it was made with
        return False
    together = torch.cat([half for half, _ in halves])
    return not only_rows or (torch.equal(whole, again) and not torch.allclose(whole, together, rtol=1e-3, atol=1e-5))


def _tried(optimizer: Optimizer, values: Tensor) -> tuple[Tensor, bool]:
    """What these values are after some steps, and whether all that the optimiser keeps has their shape."""
    parameter = nn.Parameter(values.clone())
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer))
    trial.__dict__.pop("step", None)  # a schedule may have put its own there, which steps the optimiser itself
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict):  # hooks
            setattr(trial, name, OrderedDict())
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], "params": [parameter], "lr": 0.1}]
    for step in range(STEPS):
        parameter.grad = values.cos() * (step + 1)
        trial.step()
    kept = [tensor for tensor in trial.state[parameter].values() if isinstance(tensor, Tensor) and tensor.numel() > 1]
    return parameter.detach(), all(tensor.shape == values.shape for tensor in kept)

"""The optimiser of the ready-made loop, and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer.config.schema import Optim


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """The learning rate of `step` (from 0), a pure function: linear warm-up, then cosine to 0, or a tenth after each
    third of the run (step), or constant."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    done = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    if optim.schedule == "cosine":
        return optim.lr * 0.5 * (1 + math.cos(math.pi * done))
    if optim.schedule == "step":
        return optim.lr * 0.1 ** int(3 * done)
    return optim.lr


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """AdamW or SGD, fused: fused optimisers can skip a step by a flag on the device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optim.name == "adamw":
        return torch.optim.AdamW(parameters, lr=optim.lr, weight_decay=optim.weight_decay, fused=True)
    sgd = torch.optim.SGD(parameters, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay, fused=True)
    if optim.momentum:
        for parameter in parameters:  # if the very first step is skipped, torch leaves this memory uninitialised
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd

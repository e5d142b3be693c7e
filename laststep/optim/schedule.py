"""The learning rate of each step, as the configuration's schedule has it."""

from __future__ import annotations

import math

from laststep.config.schema import Optim


def scheduled(lr: float, optim: Optim, step: int, total_steps: int) -> float:
    """The learning rate of `step` (from 0) for the peak `lr`, a pure function: linear warm-up, then cosine to 0, or a
    tenth after each third of the run (step), or constant, or constant and at the end linearly to 0 (wsd)."""
    if step < optim.warmup_steps:
        return lr * (step + 1) / (optim.warmup_steps + 1)
    done = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    if optim.schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * done))
    if optim.schedule == "step":
        return lr * 0.1 ** int(3 * done)
    if optim.schedule == "wsd":  # warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)
        return lr * min(1.0, (total_steps - step) / max(1, round(optim.decay_share * total_steps)))
    return lr

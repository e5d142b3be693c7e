"""The training that all trainers do, and the record that they write.

The step is read from the model itself (batch norm counts the batches that it has seen, and that count is part of the
weights), so that no trainer can misreport where it has resumed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset
from torchvision.datasets import MNIST
from torchvision.transforms import v2

from laststep.data.catalog import MNIST_5K
from laststep.tasks.models import build_model

EPOCHS = 6
BATCH_SIZE = 32  # over both ranks
STEPS_PER_EPOCH = 125  # of the 4,000 digits
LEARNING_RATE, MOMENTUM = 0.05, 0.9
# As with a larger model: a step takes the same time under every trainer, far longer than the trainer's overhead.
STEP_S = 0.1
RECORD = "LASTSTEP_PEERS_RECORD"  # the folder of the record, in the environment of every rank


def build() -> nn.Module:
    """The model, from a fixed seed: the tests' small network, with dropout."""
    torch.manual_seed(0)
    model: nn.Module = build_model("convnet", 1, 10, 28, {})
    return model


def training_set() -> Dataset[Any]:
    """4,000 digits."""
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.1307], [0.3081])])
    return MNIST(str(MNIST_5K), transform=transform)


def record_steps(model: nn.Module, rank: int) -> None:
    """From now on, write "step time pid" into the record after each step of rank 0, and make each step last STEP_S.

    The rank's pid is written to a separate file, for the fault that kills it.
    """
    folder = Path(os.environ[RECORD])
    (folder / f"rank_{rank}.pid").write_text(str(os.getpid()))
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    begun = time.monotonic()

    def after_step(*_: Any) -> None:
        nonlocal begun
        if rank == 0:
            with (folder / "steps.txt").open("a") as file:
                file.write(f"{int(norm.num_batches_tracked or 0)} {time.time()} {os.getpid()}\n")
        time.sleep(max(0.0, begun + STEP_S - time.monotonic()))
        begun = time.monotonic()

    register_optimizer_step_post_hook(after_step)

"""A custom loop for tests on Ray, which waits at two steps until it is stopped there."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from laststep import Run
from tests.support.tasks import await_agreement

HELD = (3, 5)  # the steps in which it waits, the first time that it does them


def main(run: Run) -> None:
    """Eight steps of a linear model with momentum."""
    torch.manual_seed(1)
    x = torch.randn(32, 4)
    loader = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for inputs, targets in run.steps(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            run.log(loss=loss)
            if run.rank == 0 and run.step in HELD and "LASTSTEP_TEST_HOLD" in os.environ:
                at = Path(os.environ["LASTSTEP_TEST_HOLD"], f"at-{run.step}")
                if not at.exists():
                    at.touch()
                    await_agreement()
            optimizer.step()

"""A training function that begins with what another tool has saved, and one that trains a part of its model."""

from __future__ import annotations

import torch
from torch import nn

from laststep import Run


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def one(run: Run) -> None:
    """Trains one model with AdamW."""
    fit(run, network())


def adapters(run: Run) -> None:
    """Trains the last layer."""
    model = network()
    model[0].requires_grad_(False)
    fit(run, model)


def fit(run: Run, model: nn.Module) -> None:
    """One epoch of four steps."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    net = nn.parallel.DistributedDataParallel(model)
    run.restore(model=net, optimizer=optimizer)
    data = torch.linspace(-1, 1, 64).view(16, 4)
    for _ in run.epochs(1):
        for batch in run.steps(run.loader(list(data), 4)):
            optimizer.zero_grad()
            loss = net(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)

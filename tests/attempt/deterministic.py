"""Runs that use an operator without a deterministic form; the CPU refuses it in place of a GPU."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor, nn

from laststep import Run
from laststep.tasks.classification import Classification
from tests.support.tasks import scatter

SCATTERS = "task=tests.attempt.deterministic.Scatters"
LOOP = "task=tests.attempt.deterministic.scatters_in_a_loop"
# Where an attempt looks the answer up.
ASKED = ("laststep.ranks.device.is_deterministic", "laststep.attempt.start.is_deterministic")


class Scatters(Classification):
    """Its training step uses such an operator."""

    def step(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        output = super().step(model, batch)
        return {**output, "loss": output["loss"] + scatter(torch.zeros(3)).sum()}


class InForward(nn.Linear):
    """A layer that uses it, and so in the rehearsal."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + scatter(out.detach())


def scatters_in_a_loop(run: Run) -> None:
    """A custom loop whose model uses it."""
    model = nn.parallel.DistributedDataParallel(InForward(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for (x,) in run.steps(run.loader(torch.utils.data.TensorDataset(torch.ones(12, 2)), 6)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


def like_on_a_gpu() -> None:
    """Let this rank, on the CPU, refuse what a rank on a GPU refuses."""
    for name in ASKED:
        mock.patch(name, lambda config, device: config.train.deterministic).start()

"""Tasks whose model has parts that a step, a micro-batch or every rank leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from laststep.ranks.launchers import detect_world
from tests.support.tasks import Signalled


class Net(nn.Module):
    """Two branches, of which a batch takes one or none, and one that no batch takes."""

    def __init__(self, choose: Callable[[Tensor], str]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 24), nn.Linear(24, 3)
        self.light, self.dark, self.never = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.body(x.flatten(1)))
        branch = self.choose(x)
        if branch != "none":
            h = h + (self.light if branch == "light" else self.dark)(h)
        out: Tensor = self.head(h)
        return out


class Branches(Signalled):
    """The branch follows from the batch. The model is called twice in a step, as for two views of an image."""

    def model(self) -> nn.Module:
        return Net(self.choose)

    def choose(self, x: Tensor) -> str:
        """The branch that a batch takes."""
        return ("none", "light", "dark")[int(float(x.abs().max()) * 1e4) % 3]

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        measured = super().step(model, batch)
        return {**measured, "loss": measured["loss"] + functional.cross_entropy(model(images / 2), labels)}


class Constant(Branches):
    """The same two parts are never used, on any rank."""

    def choose(self, x: Tensor) -> str:
        return "light"


class Late(Branches):
    """Rank 1 leaves a part out in the fourth step, and only there."""

    def model(self) -> nn.Module:
        net = Net(self.choose)
        net.never.requires_grad_(False)
        net.dark.requires_grad_(False)
        return net

    def choose(self, x: Tensor) -> str:
        return "none" if detect_world().rank == 1 and self.calls == 4 else "light"


class _Sometimes(torch.autograd.Function):
    """The parameter itself, with a gradient only for some batches."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        return gradient if int(float(gradient.abs().max()) * 1e6) % 2 else None


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(192, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1)) + _Sometimes.apply(self.shift)
        return out


class Undefined(Signalled):
    """Autograd gives a parameter no gradient in some shares, although the forward pass uses it."""

    def model(self) -> nn.Module:
        return _Shifted()

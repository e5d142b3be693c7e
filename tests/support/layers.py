"""A small transformer with dropout, in layers that are sharded one by one; and an operator that torch may refuse.

The numbers of elements of the transformer's tensors are multiples of 16, so that they fill the vectors of a CPU: the
elements that do not are computed otherwise where a tensor is not cut, see laststep.loops.sharded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


def transformer(classes: int = 16) -> nn.Module:
    """For images of 3 x 8 x 8."""
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 16), Layer(), Layer(), nn.Flatten(), nn.Linear(48, classes))


def scatter(x: Tensor) -> Tensor:
    """An operator that has no deterministic form, also on CPUs."""
    return torch.zeros_like(x).put_(torch.tensor([0]), torch.ones(1))

"""Twelve images with labels, a task that classifies them, and a real network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchvision import models

from laststep.config.config import Config
from laststep.task import Task

IMAGES = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(5, (12,), generator=torch.Generator().manual_seed(2))


class Images(Task):
    """Classifies `IMAGES` with the model that it is given."""

    def __init__(self, config: Config, build: Callable[[], nn.Module]) -> None:
        super().__init__(config)
        self.build = build

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        raise NotImplementedError

    def model(self) -> nn.Module:
        return self.build()

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        return {
            "loss": functional.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(1) == labels).float().mean(),
        }


def resnet() -> nn.Module:
    """A real one."""
    return models.resnet18(num_classes=5)

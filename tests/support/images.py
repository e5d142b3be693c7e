"""Twelve images with labels, a task that classifies them, and a real network; and folders of images, made from a fixed
seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
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


def photo(number: int, width: int = 60, height: int = 40) -> Image.Image:
    """A smooth, coloured image without symmetry, different for each number."""
    coarse = numpy.random.default_rng(number).integers(0, 256, (4, 6, 3), dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def make_folder(root: Path, train: int, val: int, classes: int = 2) -> Path:
    """root/{train,val}/CLASS/NUMBER.jpg, of several sizes; returns the root."""
    for part, count in {"train": train, "val": val}.items():
        for number in range(count):
            path = root / part / f"class{number % classes}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(number, 60 + number % 3, 40 + number % 5).save(path)
    return root

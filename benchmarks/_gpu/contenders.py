"""The trainings to time: a minimal loop (`python -m benchmarks._gpu.contenders [MODE]`), and the same as a Task."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks._gpu.turns import PIPE, Turns
from laststep.data.catalog import DATASETS
from laststep.tasks.classification import Classification
from laststep.tasks.models import build_model

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
WORKLOAD = "LASTSTEP_GPU_WORKLOAD"  # in the environment of every training process
HELD = 1024  # images in device memory; each step uses some of them
LEARNING_RATE = 0.001


class Workload(NamedTuple):
    """A model, its input, and the steps of a turn."""

    model: str
    batch_size: int
    image_size: int
    lead: int  # steps at the start of each turn that are not timed
    steps: int  # timed steps of each turn
    classes: int = 1000
    workers: int = 0
    jpegs: str = ""  # the folder of JPEGs; empty: images in device memory

    @classmethod
    def from_env(cls) -> Workload:
        """The workload that this process is to train."""
        return cls(*json.loads(os.environ[WORKLOAD]))


class Timed(Classification):
    """The same training under Laststep, started as a user would start it."""

    reads = ("data",)

    def model(self) -> nn.Module:
        """The model; starts counting steps."""
        load = Workload.from_env()
        self.turns = Turns(DEVICE, load.lead, load.steps) if PIPE in os.environ else None
        return super().model()

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss on a batch."""
        if model.training and self.turns is not None:
            self.turns.begin_step()
        return super().step(model, batch)


class Held(Timed):
    """Training on images in device memory; a sample is the index of an image."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Enough samples for all steps, so that no epoch ends during a turn."""
        load, train = Workload.from_env(), self.config.train
        self.classes = load.classes
        self.pixels = make_pixels(load)
        numbers = torch.arange((train.max_steps or 0) * train.batch_size) % HELD
        labels = numbers % load.classes
        return TensorDataset(numbers, labels), TensorDataset(numbers[: train.batch_size], labels[: train.batch_size])

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss on a batch of indices."""
        numbers, labels = batch
        return super().step(model, (as_floats(self.pixels[numbers]), labels))


def bare(mode: str | None = None) -> None:
    """A minimal loop with everything that makes it fast; `mode` is torch.compile's."""
    load = Workload.from_env()
    torch.backends.cudnn.benchmark = True
    model = build_model(load.model, 3, load.classes, load.image_size, {})
    model.to(DEVICE, memory_format=torch.channels_last)
    if GPU:
        model.compile(dynamic=False, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, fused=True)
    turns = Turns(DEVICE, load.lead, load.steps)
    for images, labels in decoded(load) if load.jpegs else held(load):
        turns.begin_step()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def held(load: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images in device memory."""
    pixels = make_pixels(load)
    while True:
        numbers = torch.randint(HELD, (load.batch_size,), device=DEVICE)
        yield as_floats(pixels[numbers]), numbers % load.classes


def make_pixels(load: Workload) -> Tensor:
    """Random images (N, H, W, C) in uint8, as from a decoder."""
    return torch.randint(256, (HELD, load.image_size, load.image_size, 3), dtype=torch.uint8, device=DEVICE)


def as_floats(pixels: Tensor) -> Tensor:
    """The pixels as (N, C, H, W), channels last in memory, normalized to mean 0 and variance 1."""
    return (pixels.permute(0, 3, 1, 2).float() - 127.5) / 73.9


def decoded(load: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of photos, as torchvision's reference reads them."""
    info = DATASETS["imagefolder"]
    crop = [v2.RandomResizedCrop(load.image_size, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    transform = v2.Compose([*crop, v2.ToDtype(torch.float, scale=True), v2.Normalize(list(info.mean), list(info.std))])
    photos = ImageFolder(f"{load.jpegs}/train", transform)
    for images, labels in DataLoader(photos, load.batch_size, True, num_workers=load.workers, pin_memory=GPU):
        images = images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
        yield images, labels.to(DEVICE, non_blocking=True)


if __name__ == "__main__":
    bare(*sys.argv[1:])

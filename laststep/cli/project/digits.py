"""What to train: a small convolutional network that reads handwritten digits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST

from laststep import Task
from laststep.data.catalog import MNIST_5K  # the folder of 5,000 digits that come with Laststep


@dataclass
class Settings:
    """Settings of this task: `laststep --local args.width=64`, or `laststep sweep args.width=16,32`."""

    width: int = 32  # channels of the first block; the second has twice as many


class Digits(Task):
    """Laststep does the rest: batches, optimiser, learning rate, validation, checkpoints."""

    settings = Settings
    reads = ()  # nothing of `model` and `data`, so `model.name=resnet18`, which would change nothing, is refused

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        """The training set and the validation set."""
        return digits(train=True), digits(train=False)

    def model(self) -> nn.Module:
        """The model, with its initial weights."""
        width = self.args.width
        head = nn.Flatten(), nn.Dropout(0.25), nn.Linear(2 * width * 7 * 7, 10)
        return nn.Sequential(*block(1, width), *block(width, 2 * width), *head)

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss to minimise, and further metrics, of one batch."""
        images, labels = batch
        logits = model(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": accuracy}


def digits(train: bool) -> TensorDataset:
    """Images (N, 1, 28, 28) between 0 and 1, and their labels (N,)."""
    data = MNIST(MNIST_5K, train=train)
    return TensorDataset(data.data.to(torch.float32).unsqueeze(1) / 255, data.targets)


def block(inputs: int, outputs: int) -> list[nn.Module]:
    """A convolution that halves the image."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

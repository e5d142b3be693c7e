"""Small data for the scripts: images of digits, and English text."""

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision import datasets

from laststep.data.catalog import MNIST_5K


def digits(train: bool) -> TensorDataset:
    images = datasets.MNIST(MNIST_5K, train=train)
    return TensorDataset(images.data.flatten(1) / 255, images.targets)


def text() -> Tensor:
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()

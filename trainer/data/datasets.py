"""torchvision's data sets by name, with their transforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import v2

from trainer.config import ConfigError
from trainer.data.catalog import DATASETS, MNIST_5K
from trainer.schema import Data

_CLASSES = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10}


def prepare_data(data: Data) -> None:
    """Download the data set unless it is there. Raises ConfigError when it can neither be found nor be had."""
    if not DATASETS[data.name].download:
        return
    try:
        for train in (True, False):
            _CLASSES[data.name](data.root, train=train, download=True)
    except Exception as error:  # no network, a full disk, a server's error page: torchvision raises whatever it meets
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"data.root={data.root}: {data.name} is not there and could not be downloaded ({reason}); "
            f"copy it there, or name the folder that has it"
        ) from error


def open_datasets(data: Data, channels: int, image_size: int) -> tuple[Dataset[Any], Dataset[Any], int]:
    """The training set, the validation set and the number of classes. Raises ConfigError."""
    sets: list[Any] = []
    for train in (True, False):
        transform = _transform(data, channels, image_size, train)
        if data.name == "mnist-5k":
            sets.append(datasets.MNIST(str(MNIST_5K), train=train, transform=transform))
        elif data.name == "imagefolder":
            folder = Path(data.root) / ("train" if train else "val")
            try:
                sets.append(datasets.ImageFolder(str(folder), transform=transform))
            except FileNotFoundError as error:
                raise ConfigError(f"data.root={data.root}: {error}") from error
        elif data.name == "fake":
            samples, classes = int(data.args.get("samples", 1000)), int(data.args.get("classes", 10))
            offset = 0 if train else samples  # other images than those trained on
            size = (3, image_size, image_size)
            sets.append(datasets.FakeData(samples, size, classes, transform=transform, random_offset=offset))
        else:
            sets.append(_CLASSES[data.name](data.root, train=train, transform=transform))
    train_set, val_set = sets
    if data.name == "imagefolder" and train_set.classes != val_set.classes:
        raise ConfigError(f"data.root={data.root}: train/ and val/ have different classes")
    classes = int(data.args.get("classes", 10)) if data.name == "fake" else len(train_set.classes)
    return train_set, val_set, classes


def _transform(data: Data, channels: int, image_size: int, train: bool) -> v2.Compose:
    """From a PIL image to a normalised float tensor (channels, image_size, image_size)."""
    info = DATASETS[data.name]
    augment = train and bool(data.args.get("augment", False))
    steps: list[Any] = [v2.PILToTensor()]
    if data.name == "imagefolder":
        steps += (
            [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
            if augment
            else [v2.Resize(round(image_size * 256 / 224), antialias=True), v2.CenterCrop(image_size)]
        )
    else:
        if image_size != info.image_size and data.name != "fake":
            steps.append(v2.Resize(image_size, antialias=True))
        if augment:
            steps.append(v2.RandomCrop(image_size, padding=image_size // 8))
            if "mnist" not in data.name:  # a mirrored digit is another digit, or none
                steps.append(v2.RandomHorizontalFlip())
    steps.append(v2.ToDtype(torch.float32, scale=True))
    if channels != info.channels:
        steps.append(v2.Grayscale(channels))
    mean, std = (values if len(values) == channels else values * channels for values in (info.mean, info.std))
    return v2.Compose([*steps, v2.Normalize(list(mean), list(std))])

"""Opens the ready-made data sets by name. They are torchvision's, with uint8 pixels as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets

from laststep.config.errors import ConfigError
from laststep.config.schema import Data
from laststep.data.catalog import DATASETS, MNIST_5K
from laststep.data.image_files import ImageFiles
from laststep.data.pixels import Augmentation, Images

# These are held in memory, as torchvision holds them; the largest is CIFAR-10 with 150 MB.
_IN_MEMORY = {
    "mnist-5k": datasets.MNIST,
    "mnist": datasets.MNIST,
    "fashion-mnist": datasets.FashionMNIST,
    "cifar10": datasets.CIFAR10,
}


def prepare_data(data: Data) -> None:
    """Download the data set unless it is there. Raises ConfigError if that fails."""
    if not DATASETS[data.name].download:
        return
    try:
        for train in (True, False):
            _IN_MEMORY[data.name](data.root, train=train, download=True)
    except Exception as error:  # no network, a full disk, a server's error page: torchvision may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"data.root={data.root}: {data.name} is not in this folder and could not be downloaded ({reason}); "
            f"copy it there, or set data.root to the folder that has it"
        ) from error


def open_datasets(data: Data, image_size: int) -> tuple[Dataset[Any], Dataset[Any], int]:
    """The training set, the validation set and the number of classes.

    A sample is (pixels (image_size, image_size, channels), label). Raises ConfigError.
    """
    (train_set, classes), (val_set, val_classes) = (_open(data, image_size, train) for train in (True, False))
    if classes != val_classes:
        raise ConfigError(f"data.root={data.root}: train/ and val/ have different classes")
    return train_set, val_set, len(classes)


def _open(data: Data, size: int, train: bool) -> tuple[Dataset[Any], Sequence[Any]]:
    """The training set or the validation set, and its classes."""
    augment = train and bool(data.args.get("augment", False))
    if data.name == "imagefolder":
        try:
            part, args = "train" if train else "val", data.args
            cache, on_device = (bool(args.get(name)) for name in ("cache", "decode_on_device"))
            files = ImageFiles(data.root, part, size, augment, cache, on_device)
        except FileNotFoundError as error:
            raise ConfigError(f"data.root={data.root}: {error}") from error
        return files, files.classes
    # Digits are not mirrored: a mirrored digit is another digit, or none.
    augmentation = Augmentation(size // 8, mirror="mnist" not in data.name) if augment else None
    if data.name == "fake":
        samples, classes = int(data.args.get("samples", 1000)), int(data.args.get("classes", 10))
        offset = 0 if train else samples  # so that the validation images differ from the training images
        return FakeImages(samples, size, classes, offset, augmentation), range(classes)
    root = str(MNIST_5K) if data.name == "mnist-5k" else data.root
    opened = _IN_MEMORY[data.name](root, train=train)
    pixels = torch.as_tensor(opened.data)  # (N, H, W, C), or (N, H, W) if there is one channel
    images = Images(pixels.view(*pixels.shape[:3], -1), torch.as_tensor(opened.targets), size, augmentation)
    return images, opened.classes


class FakeImages(Dataset[Any]):
    """The images of torchvision's FakeData in a fraction of the time: it calls torch.manual_seed for each, which visits
    every backend."""

    def __init__(self, samples: int, size: int, classes: int, offset: int, augmentation: Augmentation | None) -> None:
        self.samples = samples
        self.size = size
        self.classes = classes
        self.offset = offset
        self.augmentation = augmentation

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self.samples:
            raise IndexError(index)
        draws = torch.Generator().manual_seed(index + self.offset)
        pixels = torch.randn(3, self.size, self.size, generator=draws).mul(255).byte().permute(1, 2, 0).contiguous()
        label = int(torch.randint(self.classes, (1,), generator=draws))
        return (self.augmentation(pixels[None], self.augmentation.draw(1))[0] if self.augmentation else pixels), label

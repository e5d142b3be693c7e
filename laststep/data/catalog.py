"""The ready-made data sets: facts that the configuration checks and the tasks need before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MNIST_5K = Path(__file__).resolve().parent / "mnist-5k"
CLASSICS = Path(__file__).resolve().parent / "classics"
TEXTS = ("classics", "tokens")  # for task=language; the others are images


@dataclass(frozen=True)
class DatasetInfo:
    """Shape and colour statistics of a data set. `classes` is None if they are counted when it is opened."""

    channels: int
    image_size: int
    classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    download: bool = False


# Mean and standard deviation of the training pixels: the values in common use.
_MNIST = ((0.1307,), (0.3081,))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
DATASETS = {
    "mnist-5k": DatasetInfo(1, 28, 10, *_MNIST),
    "mnist": DatasetInfo(1, 28, 10, *_MNIST, download=True),
    "fashion-mnist": DatasetInfo(1, 28, 10, (0.2860,), (0.3530,), download=True),
    "cifar10": DatasetInfo(3, 32, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), download=True),
    "imagefolder": DatasetInfo(3, 224, None, *_IMAGENET),
    "fake": DatasetInfo(3, 32, 10, *_IMAGENET),
}
# The data.args that each data set accepts.
_ANY = {"augment", "image_size"}
_MORE = {"fake": {"classes", "samples"}, "imagefolder": {"cache", "decode_on_device"}}
DATA_ARGS = {name: _ANY | _MORE.get(name, set()) for name in DATASETS}
FLAGS = {"augment", "cache", "decode_on_device"}  # the data.args that are true or false

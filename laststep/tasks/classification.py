"""Image classification: cross-entropy and accuracy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from laststep.config.config import Config
from laststep.data.catalog import DATASETS
from laststep.data.datasets import decode_batch, open_datasets, prepare_data
from laststep.data.pixels import normalized
from laststep.task import Task
from laststep.tasks.models import build_model

# Weight of the auxiliary classifiers' losses in GoogLeNet and Inception (Szegedy et al. 2015, arXiv:1409.4842).
AUXILIARY_WEIGHT = 0.3


class Classification(Task):
    """Any data set of `data.name` with any model of `model.name`.

    A sample is (pixels (H, W, C) as uint8, label). `on_device` makes batches of (images (N, C, H, W), labels (N,)).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.info = DATASETS[config.data.name]
        self.channels = self.info.channels if config.model.name == "convnet" else 3
        self.image_size = int(config.data.args.get("image_size", self.info.image_size))
        self.classes = self.info.classes

    def prepare(self) -> None:
        prepare_data(self.config.data)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        train, val, self.classes = open_datasets(self.config.data, self.image_size)
        return train, val

    def model(self) -> nn.Module:
        model = self.config.model
        return build_model(model.name, self.channels, self.classes or 0, self.image_size, model.args)

    def on_device(self, batch: Any) -> Any:
        images, *rest = batch
        if isinstance(images, list):  # some samples are JPEGs, not decoded yet
            images = decode_batch(rest[0].device, images, self.image_size)
        if images.dtype == torch.uint8:
            layout = torch.channels_last if self.config.train.channels_last else torch.contiguous_format
            images = normalized(images, self.info.mean, self.info.std, self.channels, layout)
        return images, *rest

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        auxiliary: list[Tensor] = []
        if isinstance(logits, tuple):  # GoogLeNet and Inception in training: (logits, auxiliary logits ...)
            logits, *rest = logits
            auxiliary = [x for x in rest if x is not None]
        loss = functional.cross_entropy(logits, labels)
        for extra in auxiliary:
            loss = loss + AUXILIARY_WEIGHT * functional.cross_entropy(extra, labels)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

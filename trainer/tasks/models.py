"""Image classification models by name: a small convolutional network, and torchvision's models."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError, nearest


def model_names() -> list[str]:
    """Every valid `model.name`, sorted. Reads torchvision's source, where a decorator marks each model: importing it
    would import torch."""
    names = {"convnet"}
    spec = importlib.util.find_spec("torchvision")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for source in (Path(folder) / "models").glob("*.py"):
            names.update(re.findall(r"@register_model\(\)(?:\n@.*)*\ndef (\w+)", source.read_text()))
    return sorted(names)


def check_model_name(name: str) -> None:
    """Raise ConfigError, which suggests the nearest name, when there is no such model."""
    names = model_names()
    # A login node that submits ranks into a container image may lack torchvision. Then only the ranks can check.
    if name not in names and importlib.util.find_spec("torchvision"):
        raise ConfigError(f"model.name={name}: no such model; {nearest(name, names)}")


def build_model(name: str, channels: int, classes: int, image_size: int, args: dict[str, Any]) -> Any:
    """An `nn.Module` from images (N, channels, image_size, image_size) to logits (N, classes).

    torchvision's models always take 3 channels. `args` are passed to the model. Raises ConfigError when the model does
    not take them.
    """
    check_model_name(name)
    try:
        if name == "convnet":
            return _convnet(channels, classes, image_size, **args)
        from torchvision import models

        size = {"image_size": image_size} if name.startswith("vit_") else {}  # only this family is built for one size
        return models.get_model(name, num_classes=classes, **({"weights": None} | size | args))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.args={args}: {name} does not take them: {error}") from error


def _convnet(channels: int, classes: int, image_size: int, width: int = 32, dropout: float = 0.25) -> Any:
    """Two convolutions with batch norm, two linear layers, dropout. Learns digits in seconds on a CPU."""
    from torch import nn

    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"width must be a positive integer, got {width}")

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    return nn.Sequential(
        *block(channels, width),
        *block(width, 2 * width),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * (image_size // 4) ** 2, 4 * width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, classes),
    )

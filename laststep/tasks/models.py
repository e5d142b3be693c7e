"""Image classification models by name: a small convolutional network, and torchvision's models."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laststep.config.errors import ConfigError, first_line, nearest


def model_names() -> list[str]:
    """Every valid `model.name`, sorted. Reads torchvision's source, where a decorator marks each model: importing it
    would import torch."""
    names = {"convnet"}
    for source in _sources():
        names.update(re.findall(r"@register_model\(\)(?:\n@.*)*\ndef (\w+)", source))
    return sorted(names)


def check_model_name(name: str) -> None:
    """Raise ConfigError, which suggests the nearest name, when there is no such model."""
    names = model_names()
    # A login node that submits ranks into a container image may lack torchvision. Then only the ranks can check.
    if name not in names and importlib.util.find_spec("torchvision"):
        raise ConfigError(f"model.name={name}: no such model; {nearest(name, names)}")


def is_weights_name(given: str) -> bool:
    """Whether a value of model.weights is torchvision's name for weights, such as DEFAULT or IMAGENET1K_V1, rather than
    a path."""
    return re.fullmatch(r"DEFAULT|IMAGENET1K_\w+", given) is not None


def weights_names(model: str) -> list[str]:
    """torchvision's names for the weights of a model, from its source like `model_names`; empty where it has none."""
    for source in _sources():
        if found := re.search(rf"\ndef {model}\(\s*\*, weights: Optional\[(\w+)\]", source):
            body = re.search(rf"\nclass {found[1]}\(WeightsEnum\):\n((?:    .*\n|\n)+)", source)
            return re.findall(r"^    ([A-Z][A-Z0-9_]*) = ", body[1], re.MULTILINE) if body else []
    return []


def check_weights_name(model: str, given: str) -> None:
    """Raise ConfigError when torchvision has no weights of this name for the model."""
    names = weights_names(model)
    if given not in names and importlib.util.find_spec("torchvision"):
        hint = nearest(given, names) if names else f"torchvision has no weights for {model}; name a file or a run"
        raise ConfigError(f"model.weights={given}: no such weights; {hint}")


def pretrained_weights(model: str, given: str, args: dict[str, Any]) -> dict[str, Any]:
    """torchvision's weights of this name for a model, downloaded unless they are in torch's folder for downloads.

    Raises ConfigError, which says what to put where, when they cannot be had.
    """
    import torch
    from torchvision import models

    check_weights_name(model, given)
    weights = models.get_model_weights(model)[given]
    if model == "googlenet":  # the one model that is built without its auxiliary classifiers when weights are given
        args = {"aux_logits": True, **args}
    try:
        # Not get_state_dict: some models change the names in the file as they load it.
        return models.get_model(model, weights=weights, progress=False, **args).state_dict()
    except Exception as error:  # no network, a full disk, a damaged file: torch.hub may raise anything
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise ConfigError(
            f"model.weights={given}: could not be downloaded or read ({first_line(error)}); put "
            f"{weights.url.rpartition('/')[2]}, from {weights.url}, into {folder}/"
        ) from error


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


def _sources() -> Iterator[str]:
    """The source files of torchvision's models."""
    spec = importlib.util.find_spec("torchvision")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for source in sorted((Path(folder) / "models").glob("*.py")):
            yield source.read_text()

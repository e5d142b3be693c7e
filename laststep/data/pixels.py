"""Images as uint8 pixels (height, width, channels), the form in which decoders return them.

They become floats only on the device. So a quarter of the bytes is passed from worker to rank to device, and the same
operation is applied to a whole batch at once, on the CPU or on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from laststep.data.order import seed_of


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of small images: each is shifted by up to `padding` pixels each way, the gap filled with black, and
    mirrored or not."""

    padding: int
    mirror: bool

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws (count, 3): shift of rows, shift of columns, mirrored or not. `generator` None: the global one."""
        shifts = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        mirrored = torch.randint(1 + self.mirror, (count, 1), generator=generator)
        return torch.cat([shifts, mirrored], dim=1)

    def __call__(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """Pixels (N, H, W, C), each image shifted and mirrored according to its row of `draws`."""
        _, height, width, _ = pixels.shape
        padded = functional.pad(pixels, (0, 0, *[self.padding] * 4))
        windows = padded.unfold(1, height, 1).unfold(2, width, 1)  # (N, rows, columns, C, H, W), a view
        rows, columns, mirrored = draws.unbind(1)
        shifted = windows[torch.arange(len(pixels), device=pixels.device), rows, columns].permute(0, 2, 3, 1)
        return torch.where(mirrored.bool().view(-1, 1, 1, 1), shifted.flip(2), shifted)


class Images(TensorDataset):
    """Images held in memory: pixels (N, H, W, C) and labels (N,). A sample is (pixels (size, size, C), label)."""

    def __init__(self, pixels: Tensor, labels: Tensor, size: int, augmentation: Augmentation | None) -> None:
        super().__init__(pixels, labels)
        self.size = size
        self.augmentation = augmentation

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample, for data sets that wrap this one. Slow, and drawn from the global generator."""
        pixels, labels = (tensor[index : index + 1] for tensor in self.tensors)
        draws = self.augmentation.draw(1) if self.augmentation else None
        return self.resized_and_augmented(pixels, draws)[0], labels[0]

    def resized_and_augmented(self, pixels: Tensor, draws: Tensor | None) -> Tensor:
        """Resize pixels (n, H, W, C) to (n, size, size, C) and apply their `draws`, on any device."""
        if pixels.shape[1:3] != (self.size, self.size):
            # Imported here, so that runs without images do not import torchvision.
            from torchvision.transforms.v2.functional import resize

            pixels = resize(pixels.permute(0, 3, 1, 2), [self.size, self.size], antialias=True).permute(0, 2, 3, 1)
        return pixels if self.augmentation is None or draws is None else self.augmentation(pixels, draws)

    def draws(self, seed: int, epoch: int, device: torch.device) -> Tensor | None:
        """The draws of all samples in an epoch, in sample order. None without augmentation."""
        return _draws(self.augmentation, len(self), seed, epoch, device) if self.augmentation else None


@lru_cache(maxsize=2)  # kept on the device, so that they are copied once per epoch and not for each batch
def _draws(augmentation: Augmentation, samples: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of("augment", seed, epoch))
    return augmentation.draw(samples, generator).to(device)


def normalized(
    pixels: Tensor, mean: Sequence[float], std: Sequence[float], channels: int, layout: torch.memory_format
) -> Tensor:
    """Pixels (N, H, W, C) as floats (N, channels, H, W), normalized by the data set's mean and standard deviation.

    `mean` and `std` are relative to 255. Grey images (C = 1) are expanded to any number of channels.
    """
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), channels, pixels.device)
    images = pixels.permute(0, 3, 1, 2).expand(-1, channels, -1, -1).to(torch.float32, memory_format=layout)
    return images.mul_(scale).add_(shift)


@lru_cache  # kept on the device: a copy in each step would have to wait for it
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], channels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    means, stds = (torch.tensor(values).expand(channels).view(-1, 1, 1) for values in (mean, std))
    return (1 / (255 * stds)).to(device), (-means / stds).to(device)

"""Images as pixels: uint8, (height, width, channels), as decoders make them. They become floats on the device alone.

So a quarter of the bytes passes from worker to rank to device, and what is done to every image is done to whole
batches, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainer.data.order import seed_of


@dataclass(frozen=True)
class Augmentation:
    """A small image's: it is shifted by up to `padding` pixels each way, over black, and mirrored or not."""

    padding: int
    mirror: bool

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """(count, 3): rows, columns and whether mirrored; from the global generator if none is given."""
        shifts = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        mirrored = torch.randint(1 + self.mirror, (count, 1), generator=generator)
        return torch.cat([shifts, mirrored], dim=1)

    def __call__(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """(N, H, W, C) pixels, each shifted and mirrored as its line of `draws` says."""
        _, height, width, _ = pixels.shape
        padded = functional.pad(pixels, (0, 0, *[self.padding] * 4))
        windows = padded.unfold(1, height, 1).unfold(2, width, 1)  # (N, rows, columns, C, H, W), a view
        rows, columns, mirrored = draws.unbind(1)
        shifted = windows[torch.arange(len(pixels), device=pixels.device), rows, columns].permute(0, 2, 3, 1)
        return torch.where(mirrored.bool().view(-1, 1, 1, 1), shifted.flip(2), shifted)


class Images(TensorDataset):
    """Pixels (N, H, W, C) and labels (N,), held in memory. A sample is (pixels (size, size, C), label)."""

    def __init__(self, pixels: Tensor, labels: Tensor, size: int, augmentation: Augmentation | None) -> None:
        super().__init__(pixels, labels)
        self.size = size
        self.augmentation = augmentation

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """For whoever wraps it in a data set of another kind: slow, and drawn from the global generator."""
        pixels, labels = (tensor[index : index + 1] for tensor in self.tensors)
        draws = self.augmentation.draw(1) if self.augmentation else None
        return self.finish(pixels, draws)[0], labels[0]

    def finish(self, pixels: Tensor, draws: Tensor | None) -> Tensor:
        """What is left to do to some of the pixels, on whatever device."""
        if pixels.shape[1:3] != (self.size, self.size):
            # Here and not above: who has no images need not import torchvision.
            from torchvision.transforms.v2.functional import resize

            pixels = resize(pixels.permute(0, 3, 1, 2), [self.size, self.size], antialias=True).permute(0, 2, 3, 1)
        return pixels if self.augmentation is None or draws is None else self.augmentation(pixels, draws)

    def draws(self, seed: int, epoch: int, device: torch.device) -> Tensor | None:
        """Every sample's draws in an epoch, in the order of samples."""
        return _draws(self.augmentation, len(self), seed, epoch, device) if self.augmentation else None


@lru_cache(maxsize=2)  # an epoch's, on the device: not a copy for each batch
def _draws(augmentation: Augmentation, samples: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of("augment", seed, epoch))
    return augmentation.draw(samples, generator).to(device)


def normalized(
    pixels: Tensor, mean: Sequence[float], std: Sequence[float], channels: int, layout: torch.memory_format
) -> Tensor:
    """(N, H, W, C) pixels as floats (N, channels, H, W), brought to mean 0 and variance 1 by the mean and standard
    deviation of the data set, which are shares of 255. One channel is made any number of channels."""
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), channels, pixels.device)
    images = pixels.permute(0, 3, 1, 2).expand(-1, channels, -1, -1).to(torch.float32, memory_format=layout)
    return images.mul_(scale).add_(shift)


@lru_cache  # on the device: to copy them there in each step would be to wait for it
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], channels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    means, stds = (torch.tensor(values).expand(channels).view(-1, 1, 1) for values in (mean, std))
    return (1 / (255 * stds)).to(device), (-means / stds).to(device)

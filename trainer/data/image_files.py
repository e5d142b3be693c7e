"""A folder of image files: which part of an image is read, and how little of the file is decoded for it."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import torch
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2.functional import resize

from trainer.config import ConfigError

Box = tuple[int, int, int, int]  # top, left, height, width

# A random crop's share of the image's area, and its width over its height (Szegedy et al. 2015, arXiv:1409.4842).
AREA, ASPECT = [0.08, 1.0], [3 / 4, 4 / 3]
# The share of the shorter side that validation sees, as of an image of 256 pixels cropped to 224.
CENTRE = 224 / 256
# What puts an image upright, by its EXIF orientation: whether to mirror it, then quarter turns to the left.
UPRIGHT = {2: (True, 0), 3: (False, 2), 4: (True, 2), 5: (True, 1), 6: (False, 3), 7: (True, 3), 8: (False, 1)}


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """root/part/CLASS/*.jpg, or images of other kinds. A sample is (pixels (size, size, 3), label): of a random part
    of the image, mirrored or not, or of its centre."""

    def __init__(self, root: str, part: str, size: int, augment: bool) -> None:
        folder = ImageFolder(str(Path(root) / part))
        self.samples: list[tuple[str, int]] = folder.samples
        self.classes: list[str] = folder.classes
        self.root = root
        self.size = size
        self.augment = augment

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        content = Path(path).read_bytes()
        try:
            return read_image(content, self.size, self.augment), label
        except Exception as error:  # PIL raises half a dozen kinds: whatever it is, this file does not hold an image
            reason = str(error).partition(" <")[0]
            raise ConfigError(f"data.root={self.root}: {path} is not a whole image ({reason}); replace it") from error


def read_image(content: bytes, size: int, augment: bool) -> Tensor:
    """Pixels (size, size, 3) of the image that a file's content is: of a random part, mirrored or not, which the global
    generators draw, or of its centre. Raises whatever a decoder does.

    torchvision resizes in a quarter of PIL's time, but its own decoders are deprecated.
    """
    with Image.open(io.BytesIO(content)) as image:  # reads the header alone
        box = RandomResizedCrop.get_params(image, AREA, ASPECT) if augment else _centre(image)
        part = _part(image, box, min(box[2:]) // size)
        mirrored, turns = UPRIGHT.get(_orientation(image), (False, 0))
    # In half the time of pil_to_tensor.
    whole = torch.frombuffer(bytearray(part.tobytes()), dtype=torch.uint8).view(1, part.height, part.width, 3)
    pixels = resize(whole.permute(0, 3, 1, 2), [size, size], antialias=True)[0].permute(1, 2, 0)
    if mirrored:
        pixels = pixels.flip(1)
    if turns:
        pixels = pixels.rot90(turns)
    if augment and random.random() < 0.5:
        pixels = pixels.flip(1)
    return pixels


def _centre(image: Image.Image) -> Box:
    side = max(1, round(CENTRE * min(image.size)))
    return (image.height - side) // 2, (image.width - side) // 2, side, side


def _part(image: Image.Image, box: Box, shrink: int) -> Image.Image:
    """A part of the image, in colours. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where `shrink` allows it, in a
    fraction of the time."""
    top, left, height, width = box
    before = image.size
    if shrink > 1:
        image.draft(None, (image.width // shrink, image.height // shrink))
    x, y = image.width / before[0], image.height / before[1]
    edges = round(x * left), round(y * top), round(x * (left + width)), round(y * (top + height))
    return image.crop(edges).convert("RGB")


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged EXIF says nothing, and the image may be whole all the same
        return None

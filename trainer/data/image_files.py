"""A folder of image files: which part of an image is read, and how little of the file is decoded for it."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2.functional import resize

from trainer import compat
from trainer.config.errors import ConfigError
from trainer.data.decoded import Decoded, Pixels, Whole

Box = tuple[int, int, int, int]  # top, left, height, width

# A random crop's share of the image's area, and its width over its height (Szegedy et al. 2015, arXiv:1409.4842).
AREA, ASPECT = [0.08, 1.0], [3 / 4, 4 / 3]
# The share of the shorter side that validation sees, as of an image of 256 pixels cropped to 224.
CENTRE = 224 / 256
# The shorter side of an image that is kept decoded, at the least: so many times that of a sample, if the file has it.
WHOLE = 4
# What puts an image upright, by its EXIF orientation: whether to mirror it, then quarter turns to the left.
UPRIGHT = {2: (True, 0), 3: (False, 2), 4: (True, 2), 5: (True, 1), 6: (False, 3), 7: (True, 3), 8: (False, 1)}


class ImageFiles(Dataset[Any]):
    """root/part/CLASS/*.jpg, or images of other kinds. A sample is (pixels (size, size, 3), label): of a random part
    of the image, mirrored or not, or of its centre. With `cache` an image is decoded as a whole, once on each node;
    else each time it is wanted, and no more of it than is wanted. With `late` a JPEG's sample is what it is encoded as,
    see `decoded_on`."""

    def __init__(self, root: str, part: str, size: int, augment: bool, cache: bool = False, late: bool = False) -> None:
        folder = ImageFolder(str(Path(root) / part))
        self.samples: list[tuple[str, int]] = folder.samples
        self.classes: list[str] = folder.classes
        self.root = root
        self.size = size
        self.augment = augment
        self.decoded = Decoded(len(self.samples)) if cache else None
        self.late = late

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor | Encoded, int]:
        path, label = self.samples[index]
        if self.decoded is not None and (whole := self.decoded.find(index)) is not None:
            return part_of(whole, self.size, self.augment), label
        content = Path(path).read_bytes()
        try:
            if self.late:
                return encode(content, self.size, self.augment, f"data.root={self.root}: {path}"), label
            if self.decoded is None:
                return read_image(content, self.size, self.augment), label
            pixels, orientation = decode(content, WHOLE * self.size)
        except Exception as error:  # PIL raises half a dozen kinds: whatever it is, this file does not hold an image
            raise _damaged(f"data.root={self.root}: {path}", error) from error
        return part_of(self.decoded.keep(index, pixels, orientation), self.size, self.augment), label


class Encoded(NamedTuple):
    """A sample of which a JPEG's bytes, and what is to be made of them, are all there is so far; a batch has a list of
    these. The file of another kind has `pixels` already."""

    content: bytes
    box: Box
    orientation: int
    mirror: bool
    name: str  # for an error
    pixels: Tensor | None = None


compat.collate_as_list(Encoded)


def read_image(content: bytes, size: int, augment: bool) -> Tensor:
    """Pixels (size, size, 3) of the image that a file's content is: of a random part, mirrored or not, which the global
    generators draw, or of its centre. Raises whatever a decoder does.

    torchvision resizes in a quarter of PIL's time, but its own decoders are deprecated.
    """
    with Image.open(io.BytesIO(content)) as image:  # reads the header alone
        box = _box(image.width, image.height, augment)
        part = _part(image, box, min(box[2:]) // size)
        orientation = _orientation(image)
    # In half the time of pil_to_tensor.
    whole = torch.frombuffer(bytearray(part.tobytes()), dtype=torch.uint8).view(part.height, part.width, 3)
    return _finished(whole, orientation, size, _mirrors(augment))


def encode(content: bytes, size: int, augment: bool, name: str) -> Encoded:
    """The sample that a file's content is, left encoded if it is a JPEG of a usual kind. Raises whatever a decoder
    does."""
    with Image.open(io.BytesIO(content)) as image:  # reads the header alone
        if image.format != "JPEG" or image.mode not in ("L", "RGB"):
            return Encoded(b"", (0, 0, 0, 0), 1, False, name, read_image(content, size, augment))
        box = _box(image.width, image.height, augment)
        return Encoded(content, box, _orientation(image), _mirrors(augment), name)


def decoded_on(device: torch.device, images: Sequence[Encoded], size: int) -> Tensor:
    """Pixels (N, size, size, 3) of samples that were left encoded, decoded on the device: on a GPU by nvJPEG.

    torchvision's decoders are deprecated since 0.29 in favour of torchcodec's. Raises ConfigError.
    """
    wholes = iter(_decode_all([image for image in images if image.pixels is None], device))
    return torch.stack([_part_on(next(wholes), i, size) if i.pixels is None else i.pixels for i in images])


def _decode_all(encoded: Sequence[Encoded], device: torch.device) -> list[Tensor]:
    """(3, height, width) each."""
    contents = [torch.frombuffer(bytearray(image.content), dtype=torch.uint8) for image in encoded]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return decode_jpeg(contents, ImageReadMode.RGB, device) if contents else []
        except RuntimeError:  # which does not say of which image, if it is about one
            for image in encoded:
                try:
                    decode(image.content, least=1)
                except Exception as error:
                    raise _damaged(image.name, error) from error
            raise


def _part_on(whole: Tensor, image: Encoded, size: int) -> Tensor:
    top, left, height, width = image.box
    part = whole.permute(1, 2, 0)[top : top + height, left : left + width]
    return _finished(part, image.orientation, size, image.mirror)


def _damaged(name: str, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].partition(" <")[0]
    return ConfigError(f"{name} is not a whole image ({reason}); replace it")


def decode(content: bytes, least: int) -> tuple[Pixels, int]:
    """All of an image, and its EXIF orientation. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size, as long as its
    shorter side has `least` pixels. Raises whatever a decoder does."""
    with Image.open(io.BytesIO(content)) as image:
        orientation, shrink = _orientation(image), min(image.size) // least
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        return numpy.array(image.convert("RGB")), orientation


def part_of(whole: Whole, size: int, augment: bool) -> Tensor:
    """As `read_image`, of an image that is decoded."""
    top, left, height, width = _box(whole.width, whole.height, augment)
    rows = torch.from_numpy(whole.rows(top, height))
    return _finished(rows[:, left : left + width], whole.orientation, size, _mirrors(augment))


def _mirrors(augment: bool) -> bool:
    """Whether a sample is to be mirrored, drawn from the global generator."""
    return augment and random.random() < 0.5


def _finished(part: Tensor, orientation: int, size: int, mirror: bool) -> Tensor:
    """What a part (height, width, 3) of the image becomes."""
    pixels = resize(part.permute(2, 0, 1)[None], [size, size], antialias=True)[0].permute(1, 2, 0)
    mirrored, turns = UPRIGHT.get(orientation, (False, 0))
    if mirrored:
        pixels = pixels.flip(1)
    if turns:
        pixels = pixels.rot90(turns)
    if mirror:
        pixels = pixels.flip(1)
    return pixels


def _box(width: int, height: int, augment: bool) -> Box:
    """Of a random part of an image, or of its centre."""
    if augment:
        return RandomResizedCrop.get_params(torch.empty(3, height, width, device="meta"), AREA, ASPECT)
    side = max(1, round(CENTRE * min(width, height)))
    return (height - side) // 2, (width - side) // 2, side, side


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


def _orientation(image: Image.Image) -> int:
    """By EXIF; 1, upright, where that says nothing."""
    try:
        said = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # it is damaged, and the image may be whole all the same
        return 1
    return said if said in UPRIGHT else 1

"""ImageFiles: a data set of image files, and how to decode no more of a file than a sample's crop needs."""

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

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.data.decoded_cache import DecodedCache, DecodedImage, Pixels

Box = tuple[int, int, int, int]  # top, left, height, width

# Ranges of a random crop: its share of the image's area, and width / height (Szegedy et al. 2015, arXiv:1409.4842).
AREA, ASPECT = [0.08, 1.0], [3 / 4, 4 / 3]
# The side of the centre crop for validation, as a share of the shorter side: an image of 256 pixels cropped to 224.
CENTRE_SHARE = 224 / 256
# An image in the cache has a shorter side of at least this many times the side of a sample, if the file is that large.
CACHED_SCALE = 4
# How to put an image upright, by its EXIF orientation: whether to mirror it, then the number of quarter turns left.
UPRIGHT = {2: (True, 0), 3: (False, 2), 4: (True, 2), 5: (True, 1), 6: (False, 3), 7: (True, 3), 8: (False, 1)}


class ImageFiles(Dataset[Any]):
    """The images root/part/CLASS/*.jpg, or of another format. A sample is (pixels (size, size, 3), label).

    With `augment` a sample is a random crop, mirrored or not; otherwise the centre crop. With `cache` a whole image is
    decoded once per node; otherwise its crop is decoded each time. With `decode_on_device` a JPEG's sample is an
    EncodedImage, for `decode_batch`.
    """

    def __init__(
        self, root: str, part: str, size: int, augment: bool, cache: bool = False, decode_on_device: bool = False
    ) -> None:
        folder = ImageFolder(str(Path(root) / part))
        self.samples: list[tuple[str, int]] = folder.samples
        self.classes: list[str] = folder.classes
        self.root = root
        self.size = size
        self.augment = augment
        self.decoded = DecodedCache(len(self.samples)) if cache else None
        self.decode_on_device = decode_on_device

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor | EncodedImage, int]:
        path, label = self.samples[index]
        if self.decoded is not None and (image := self.decoded.get(index)) is not None:
            return crop_decoded(image, self.size, self.augment), label
        content = Path(path).read_bytes()
        try:
            if self.decode_on_device:
                return encoded_sample(content, self.size, self.augment, f"data.root={self.root}: {path}"), label
            if self.decoded is None:
                return read_image(content, self.size, self.augment), label
            pixels, orientation = decode(content, CACHED_SCALE * self.size)
        except Exception as error:  # PIL raises half a dozen kinds; each means that this file holds no intact image
            raise _damaged(f"data.root={self.root}: {path}", error) from error
        return crop_decoded(self.decoded.put(index, pixels, orientation), self.size, self.augment), label


class EncodedImage(NamedTuple):
    """A sample to be decoded later, on the device: the bytes of a JPEG and the crop drawn for it. A batch has a list of
    these. A file of another format is decoded at once, and then only `pixels` counts."""

    content: bytes
    box: Box
    orientation: int
    mirror: bool
    name: str  # of the file, for an error message
    pixels: Tensor | None = None


compat.collate_as_list(EncodedImage)


def read_image(content: bytes, size: int, augment: bool) -> Tensor:
    """The sample (size, size, 3) of an image file with this content.

    With `augment` it is a random crop, mirrored or not, drawn from the global generators; otherwise the centre crop.
    PIL decodes, since torchvision's decoders are deprecated; torchvision resizes, in a quarter of PIL's time. Raises
    any error of the decoder.
    """
    with Image.open(io.BytesIO(content)) as image:  # reads only the header
        box = _box(image.width, image.height, augment)
        crop = _decode_crop(image, box, min(box[2:]) // size)
        orientation = _orientation(image)
    # Takes half the time of pil_to_tensor.
    pixels = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8).view(crop.height, crop.width, 3)
    return _resized_upright(pixels, orientation, size, _draw_mirror(augment))


def encoded_sample(content: bytes, size: int, augment: bool, name: str) -> EncodedImage:
    """The sample of an image file with this content, left encoded if it is an RGB or grey JPEG. Raises any error of the
    decoder."""
    with Image.open(io.BytesIO(content)) as image:  # reads only the header
        if image.format != "JPEG" or image.mode not in ("L", "RGB"):
            return EncodedImage(b"", (0, 0, 0, 0), 1, False, name, read_image(content, size, augment))
        box = _box(image.width, image.height, augment)
        return EncodedImage(content, box, _orientation(image), _draw_mirror(augment), name)


def decode_batch(device: torch.device, images: Sequence[EncodedImage], size: int) -> Tensor:
    """Decode samples on the device, on a GPU by nvJPEG: pixels (N, size, size, 3). Raises ConfigError.

    torchvision's decoders are deprecated since 0.29 in favour of torchcodec's.
    """
    decoded = iter(_decode_jpegs([image for image in images if image.pixels is None], device))
    return torch.stack([_crop_on_device(next(decoded), i, size) if i.pixels is None else i.pixels for i in images])


def _decode_jpegs(encoded: Sequence[EncodedImage], device: torch.device) -> list[Tensor]:
    """Whole images, (3, height, width) each."""
    contents = [torch.frombuffer(bytearray(image.content), dtype=torch.uint8) for image in encoded]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return decode_jpeg(contents, ImageReadMode.RGB, device) if contents else []
        except RuntimeError:  # it does not say which image is damaged, if any is
            for image in encoded:
                try:
                    decode(image.content, least=1)
                except Exception as error:
                    raise _damaged(image.name, error) from error
            raise


def _crop_on_device(decoded: Tensor, image: EncodedImage, size: int) -> Tensor:
    top, left, height, width = image.box
    crop = decoded.permute(1, 2, 0)[top : top + height, left : left + width]
    return _resized_upright(crop, image.orientation, size, image.mirror)


def _damaged(name: str, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].partition(" <")[0]
    return ConfigError(f"{name} is not an intact image ({reason}); replace it")


def decode(content: bytes, least: int) -> tuple[Pixels, int]:
    """The whole image in a file with this content, and its EXIF orientation.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if its shorter side still has `least` pixels then. Raises any error
    of the decoder.
    """
    with Image.open(io.BytesIO(content)) as image:
        orientation, shrink = _orientation(image), min(image.size) // least
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        return numpy.array(image.convert("RGB")), orientation


def crop_decoded(image: DecodedImage, size: int, augment: bool) -> Tensor:
    """Like `read_image`, for an image that is decoded already."""
    top, left, height, width = _box(image.width, image.height, augment)
    rows = torch.from_numpy(image.rows(top, height))
    return _resized_upright(rows[:, left : left + width], image.orientation, size, _draw_mirror(augment))


def _draw_mirror(augment: bool) -> bool:
    """Draw from Python's global generator whether to mirror a sample; never without `augment`."""
    return augment and random.random() < 0.5


def _resized_upright(crop: Tensor, orientation: int, size: int, mirror: bool) -> Tensor:
    """A crop (height, width, 3) resized to (size, size, 3), put upright, and then mirrored or not."""
    pixels = resize(crop.permute(2, 0, 1)[None], [size, size], antialias=True)[0].permute(1, 2, 0)
    mirrored, turns = UPRIGHT.get(orientation, (False, 0))
    if mirrored:
        pixels = pixels.flip(1)
    if turns:
        pixels = pixels.rot90(turns)
    if mirror:
        pixels = pixels.flip(1)
    return pixels


def _box(width: int, height: int, augment: bool) -> Box:
    """A random crop of an image, or its centre crop."""
    if augment:
        return RandomResizedCrop.get_params(torch.empty(3, height, width, device="meta"), AREA, ASPECT)
    side = max(1, round(CENTRE_SHARE * min(width, height)))
    return (height - side) // 2, (width - side) // 2, side, side


def _decode_crop(image: Image.Image, box: Box, shrink: int) -> Image.Image:
    """The crop `box` of an image, as RGB. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size, but no smaller than
    1/`shrink`, which takes a fraction of the time."""
    top, left, height, width = box
    before = image.size
    if shrink > 1:
        image.draft(None, (image.width // shrink, image.height // shrink))
    x, y = image.width / before[0], image.height / before[1]
    edges = round(x * left), round(y * top), round(x * (left + width)), round(y * (top + height))
    return image.crop(edges).convert("RGB")


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1, which means upright, if there is none."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged EXIF data; the image may be intact all the same
        return 1
    return orientation if orientation in UPRIGHT else 1

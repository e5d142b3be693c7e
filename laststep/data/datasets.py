"""The ready-made data sets, opened by name: samples are uint8 pixels, and labels.

`open_datasets` opens torchvision's, and `FakeImages`. `ImageFiles` are files in folders, of which no more is decoded
than a sample's crop needs. With data.args.cache a `DecodedCache` has each image decoded once per node: all ranks and
workers of the node share the pixels. They are in a file in TMPDIR that is unlinked before it is used. The page cache
keeps it in memory as long as there is room, otherwise it is on the node's disk; either way it disappears with the last
rank, however the ranks end.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import random
import struct
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import numpy.typing
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2.functional import resize

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.config.schema import Data
from laststep.data.catalog import DATASETS, MNIST_5K
from laststep.data.pixels import Augmentation, Images
from laststep.ranks.group import Group
from laststep.say import say

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


@dataclass(eq=False)
class FakeImages(Dataset[Any]):
    """The images of torchvision's FakeData in a fraction of the time: it calls torch.manual_seed for each, which visits
    every backend."""

    samples: int
    size: int
    classes: int
    offset: int
    augmentation: Augmentation | None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self.samples:
            raise IndexError(index)
        draws = torch.Generator().manual_seed(index + self.offset)
        pixels = torch.randn(3, self.size, self.size, generator=draws).mul(255).byte().permute(1, 2, 0).contiguous()
        label = int(torch.randint(self.classes, (1,), generator=draws))
        return (self.augmentation(pixels[None], self.augmentation.draw(1))[0] if self.augmentation else pixels), label


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


Pixels = numpy.typing.NDArray[numpy.uint8]  # (height, width, 3)
# The cache leaves this much of the disk free for others: a share of a small disk, a fixed amount of a large one, which
# would otherwise stay without a cache while hundreds of gigabytes are free.
SPARE_SHARE, SPARE_BYTES = 0.1, 4 << 30
# The table at the start of the file has an entry per image: the offset of its pixels, height, width and EXIF
# orientation, and a checksum of these four, which distinguishes a complete entry from an empty or half-written one.
_ENTRY = struct.Struct("<QIIII")


class DecodedImage(NamedTuple):
    """A decoded image, of which any rows can be read."""

    height: int
    width: int
    orientation: int  # the value of its EXIF tag
    rows: Callable[[int, int], Pixels]  # rows(first, count)


class DecodedCache:
    """The decoded images of a data set of `count` images. It stays empty until `open_shared` is called."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._file: int | None = None  # a file descriptor, which loader workers inherit

    def open_shared(self, group: Group, name: str) -> None:
        """Open one file for all ranks of the node. All ranks call this together, with a name unique to the data set.

        Without room, or without TMPDIR, there is no file, and images are decoded each time.
        """
        path = ""
        with contextlib.ExitStack() as closing:
            with contextlib.suppress(OSError):
                new = tempfile.TemporaryDirectory(prefix="laststep-", ignore_cleanup_errors=True)
                self._file = _create_file(Path(closing.enter_context(new)) / "decoded", _ENTRY.size * self._count + 1)
                path = f"{new.name}/decoded"
            key = f"decoded/{name}/{group.world.node}"
            if group.world.local_rank == 0:
                group.store.set(key, path)
            with contextlib.suppress(OSError):  # ranks in separate containers share no TMPDIR: each keeps its own file
                shared = os.open(group.store.get(key), os.O_RDWR)
                if self._file is not None:
                    os.close(self._file)
                self._file = shared
            group.barrier(timeout_s=3600)

    def get(self, index: int) -> DecodedImage | None:
        """The image at `index` of the data set, or None if it is not in the cache."""
        if self._file is None:
            return None
        start, height, width, orientation, check = _ENTRY.unpack(os.pread(self._file, _ENTRY.size, _ENTRY.size * index))
        if check != _checksum(start, height, width, orientation):
            return None
        return DecodedImage(height, width, orientation, partial(self._read_rows, start, width))

    def put(self, index: int, pixels: Pixels, orientation: int) -> DecodedImage:
        """Add an image if there is room. Returns it either way."""
        height, width, _ = pixels.shape
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full after all: the image is decoded again next time
                start = self._reserve(pixels.nbytes)
                if start is not None and os.pwrite(self._file, pixels.data, start) == pixels.nbytes:
                    fields = start, height, width, orientation
                    os.pwrite(self._file, _ENTRY.pack(*fields, _checksum(*fields)), _ENTRY.size * index)
        return DecodedImage(height, width, orientation, lambda first, count: pixels[first : first + count])

    def _read_rows(self, start: int, width: int, first: int, count: int) -> Pixels:
        assert self._file is not None
        rows = numpy.empty((count, width, 3), dtype=numpy.uint8)
        if os.preadv(self._file, [rows.data], start + first * width * 3) != rows.nbytes:
            raise OSError("the cache of decoded images is truncated")
        return rows

    def _reserve(self, count: int) -> int | None:
        """The offset of `count` bytes of the file that are now this process's alone, or None if there is no room."""
        assert self._file is not None
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # held per process, so a forked worker gets its own
        try:
            disk, start = os.fstatvfs(self._file), os.fstat(self._file).st_size
            spare = min(SPARE_BYTES, SPARE_SHARE * disk.f_blocks * disk.f_frsize)
            if disk.f_bavail * disk.f_frsize - count < spare:
                self._warn_once()
                return None
            os.ftruncate(self._file, start + count)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return start

    def _warn_once(self) -> None:
        """Print one warning for all ranks and workers of the node that there is no more room."""
        assert self._file is not None
        flag = _ENTRY.size * self._count  # the byte after the table says whether it has been printed
        if os.pread(self._file, 1, flag) == b"\0":
            os.pwrite(self._file, b"1", flag)
            say(f"WARNING: {tempfile.gettempdir()} has no room for more decoded images: the rest is decoded each time")


def _create_file(path: Path, size: int) -> int:
    """The descriptor of a new file of `size` zero bytes."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def _checksum(*fields: int) -> int:
    return zlib.crc32(repr(fields).encode())

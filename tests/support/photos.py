"""Folders of images for tests, made from a fixed seed."""

from __future__ import annotations

from pathlib import Path

import numpy
from PIL import Image


def photo(number: int, width: int = 60, height: int = 40) -> Image.Image:
    """A smooth, coloured image without symmetry, different for each number."""
    coarse = numpy.random.default_rng(number).integers(0, 256, (4, 6, 3), dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def make_folder(root: Path, train: int, val: int, classes: int = 2) -> Path:
    """root/{train,val}/CLASS/NUMBER.jpg, of several sizes; returns the root."""
    for part, count in {"train": train, "val": val}.items():
        for number in range(count):
            path = root / part / f"class{number % classes}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(number, 60 + number % 3, 40 + number % 5).save(path)
    return root

"""Pictures and the like that a run logs: files that any viewer opens, each once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image as Pictures

from laststep.records.media import Histogram, Image, Table, Text, keep, media_of, without_media
from laststep.rundir import RunDir


@pytest.mark.parametrize(
    ("picture", "size", "corner"),
    [
        (torch.ones(3, 4, 5), (5, 4), (255, 255, 255)),
        (torch.full((1, 4, 5), 0.5, dtype=torch.bfloat16), (5, 4), 128),
        (numpy.zeros((4, 5, 3), dtype=numpy.uint8), (5, 4), (0, 0, 0)),
        (numpy.full((4, 5), 7.0), (5, 4), 255),
        (Pictures.new("RGB", (5, 4), "red"), (5, 4), (255, 0, 0)),
    ],
)
def test_pictures(tmp_path: Path, picture: Any, size: tuple[int, int], corner: Any) -> None:
    """Of each kind that data sets and models give."""
    run = RunDir(tmp_path)
    keep(run, 3, {"seen": Image(picture)})
    (path,) = media_of(run, 3)
    assert path == tmp_path / "media" / "step_000000003" / "seen.png"
    with Pictures.open(path) as found:
        assert found.size == size and found.getpixel((0, 0)) == corner


def test_the_others(tmp_path: Path) -> None:
    """As trackers take them. What is there stays: the step is done again, and its bits are the same."""
    run = RunDir(tmp_path)
    rest, media = without_media(
        {
            "loss": 1.0,
            "grads": Histogram(torch.tensor([0.0, 1.0, 1.0, float("nan")]), bins=2),
            "answers": Table(["prompt", "score"], [["why/how", 1.5], [Path("x"), 2]]),
            "a/sample": Text("once upon"),
        }
    )
    assert rest == {"loss": 1.0}
    keep(run, 1, media)
    keep(run, 1, {"a/sample": Text("another")})
    found = {path.name: path.read_text() for path in media_of(run, 1)}
    assert json.loads(found["grads.json"]) == {"kind": "histogram", "counts": [1, 2], "edges": [0.0, 0.5, 1.0]}
    assert json.loads(found["answers.json"])["rows"] == [["why/how", 1.5], ["x", 2]]
    assert found["a_sample.txt"] == "once upon"


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    """A batch of images is none; a disk that refuses ends no training."""
    with pytest.raises(ValueError, match=r"an image of shape \(2, 3, 4, 5\): must have 2 or 3 dimensions"):
        keep(RunDir(tmp_path), 1, {"batch": Image(torch.ones(2, 3, 4, 5))})
    (tmp_path / "media").touch()
    keep(RunDir(tmp_path), 1, {"text": Text("x")})

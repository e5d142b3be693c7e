"""Images, histograms, tables and texts that `run.log` takes: files under RUN/media/STEP/, each once, for trackers that
show them. They are no part of metrics.jsonl. A step that is done again has the same, so a file that exists stays."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laststep.rundir import RunDir, write_whole
from laststep.say import say


class Media:
    """Something to look at, as a file."""

    suffix = ""

    def data(self) -> bytes:
        """What is in the file. Raises ValueError for what cannot be shown."""
        raise NotImplementedError


class Image(Media):
    """A picture: of Pillow, a figure of matplotlib, or an array or tensor of bytes or of numbers from 0 to 1: (height,
    width), (height, width, channels) or (channels, height, width)."""

    suffix = ".png"

    def __init__(self, picture: Any) -> None:
        self._picture = picture

    def data(self) -> bytes:
        """See Media."""
        buffer = io.BytesIO()
        if hasattr(self._picture, "savefig"):
            self._picture.savefig(buffer, format="png")
        else:
            picture = self._picture if hasattr(self._picture, "save") else _from_array(self._picture)
            picture.save(buffer, "PNG")
        return buffer.getvalue()


class Histogram(Media):
    """How the numbers of an array or tensor are distributed."""

    suffix = ".json"

    def __init__(self, values: Any, bins: int = 64) -> None:
        self._values, self._bins = values, bins

    def data(self) -> bytes:
        """See Media."""
        import numpy

        values = _array(self._values).astype(float).ravel()
        counts, edges = numpy.histogram(values[numpy.isfinite(values)], self._bins)
        return _json("histogram", counts=counts.tolist(), edges=edges.tolist())


class Table(Media):
    """Rows of values, under these columns."""

    suffix = ".json"

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._columns, self._rows = columns, rows

    def data(self) -> bytes:
        """See Media."""
        plain = [[value if isinstance(value, (int, float, str)) else str(value) for value in row] for row in self._rows]
        return _json("table", columns=list(map(str, self._columns)), rows=plain)


class Text(Media):
    """A text, such as a sample of a language model."""

    suffix = ".txt"

    def __init__(self, text: str) -> None:
        self._text = text

    def data(self) -> bytes:
        """See Media."""
        return self._text.encode()


def without_media(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Media]]:
    """The other values, and the media."""
    media = {name: value for name, value in values.items() if isinstance(value, Media)}
    return ({name: value for name, value in values.items() if name not in media} if media else values), media


def keep(run: RunDir, step: int, media: Mapping[str, Media]) -> None:
    """Write them, unless they are there. A disk that refuses is said, and is no reason to end the training. Raises
    ValueError for what cannot be shown."""
    folder = run.media / f"step_{step:09d}"
    for name, value in media.items():
        path = folder / (re.sub(r"[^\w.\-]", "_", name) + value.suffix)
        try:
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, value.data())
        except OSError as error:
            say(f"WARNING: {path}: {error.strerror}: left out")


def _array(values: Any) -> Any:
    """An array of numpy's, of one or of a tensor on any device."""
    import numpy

    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # numpy has no bfloat16
        values = values.numpy()
    return numpy.asarray(values)


def _from_array(values: Any) -> Any:
    import numpy
    from PIL import Image as Pictures

    array = _array(values)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3):
        raise ValueError(f"an image of shape {tuple(array.shape)}: must have 2 or 3 dimensions")
    if array.dtype != numpy.uint8:
        array = (numpy.clip(array.astype(float), 0, 1) * 255).round().astype(numpy.uint8)
    return Pictures.fromarray(numpy.ascontiguousarray(array))


def _json(kind: str, **held: Any) -> bytes:
    return json.dumps({"kind": kind, **held}).encode()


def media_of(run: RunDir, step: int) -> list[Path]:
    """The files of a step."""
    return sorted(path for path in (run.media / f"step_{step:09d}").glob("*") if not path.name.endswith(".tmp"))

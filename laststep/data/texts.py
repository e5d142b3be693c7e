"""Reads documents from files of text: plain text, JSON lines or parquet. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laststep.config.errors import ConfigError, first_line

FIELD = "text"  # of a JSON object, and the column of a parquet file
CHUNK = 1 << 20  # bytes of plain text at a time
ROWS = 256  # of a parquet file at a time


@dataclass(frozen=True)
class Piece:
    """A document, or the next piece of a long one."""

    text: str
    ends_document: bool
    held_out: bool  # for validation
    done: float  # share of the file that has been read with this piece


def read_pieces(path: Path, held_out: float) -> Iterator[Piece]:
    """The documents of a file, in order. Those in its last `held_out` are for validation.

    A file of plain text is one document, cut at the end of a line; every line of a .jsonl file and every row of a
    .parquet file is one. Raises ConfigError for what cannot be read.
    """
    try:
        if path.suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(path, held_out)
        elif path.suffix == ".parquet":
            yield from _parquet(path, held_out)
        else:
            yield from _plain(path, held_out)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or first_line(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; TEXT is plain text, .jsonl or .parquet") from None


def _plain(path: Path, held_out: float) -> Iterator[Piece]:
    size = path.stat().st_size
    cut, at = int((1 - held_out) * size), 0
    with path.open("rb") as file:
        while lines := file.readlines(CHUNK if at >= cut else min(CHUNK, cut - at)):
            start, at = at, at + sum(map(len, lines))
            ends = at == size or start < cut <= at
            yield Piece(b"".join(lines).decode(), ends, start >= cut, at / size)


def _json_lines(path: Path, held_out: float) -> Iterator[Piece]:
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start, at = at, at + len(line)
            if not line.strip():
                continue
            try:
                text = json.loads(line)[FIELD]
            except UnicodeDecodeError:
                raise
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ConfigError(f"{path}, line {number}: must be a JSON object with a string {FIELD!r}")
            yield Piece(text, True, start >= (1 - held_out) * size, at / size)


def _parquet(path: Path, held_out: float) -> Iterator[Piece]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
        if FIELD not in file.schema_arrow.names:
            raise ConfigError(f"{path}: has no column {FIELD!r}, but {', '.join(file.schema_arrow.names)}")
        rows, at = file.metadata.num_rows, 0
        for batch in file.iter_batches(ROWS, columns=[FIELD]):
            for text in batch.column(0).to_pylist():
                at += 1
                yield Piece(text or "", True, at > (1 - held_out) * rows, at / rows)
    except ArrowException as error:
        raise ConfigError(f"{path}: is no parquet file, or a damaged one: {first_line(error)}") from None

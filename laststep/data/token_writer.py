"""Makes token files from text: source by source, so that an interrupted start continues. Imports no torch.

Each file is written aside, synced and renamed. A line in the journal says that all files of a source are whole; the
index, written last, that all sources are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from laststep.config.errors import ConfigError, first_line
from laststep.data.tokens import (
    FORMAT,
    INDEX,
    OFFSETS,
    PARTS,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    Part,
    Source,
    TokenFolder,
    Tokenizer,
)
from laststep.records.metrics import read_lines
from laststep.rundir import fsync

JOURNAL = "unfinished.jsonl"
Advance = Callable[[float], None]  # called with the bytes of text read since the last call


def prepare(
    texts: Sequence[Path], out: Path, tokenizer: Tokenizer, held_out: float, copy: bytes | None, advance: Advance
) -> TokenFolder:
    """Make token files of these texts in the folder `out`, or finish making them. Raises ConfigError.

    The last `held_out` of each text is for validation. `copy` is the tokenizer's file.
    """
    wanted = [_begun(text, number) for number, text in enumerate(texts)]
    request = {"format": FORMAT, "vocabulary": asdict(tokenizer.vocabulary), "validation": held_out}
    try:
        if (out / INDEX).exists():
            return _complete(out, request, wanted)
        out.mkdir(parents=True, exist_ok=True)
        with _journal(out, request) as (done, note):
            for text, begun in zip(texts, wanted):
                if (found := done.get(begun.name)) and _same_text(found, begun):
                    advance(begun.size)
                    continue
                done[begun.name] = source = _write_source(text, begun, out, tokenizer, held_out, advance)
                note(source.as_json())
            if copy is not None:
                _write(out / TOKENIZER, copy)
            folder = TokenFolder(out, tokenizer.vocabulary, [done[one.name] for one in wanted])
            _write(out / INDEX, json.dumps({**folder.as_json(), "request": request}, indent=1).encode() + b"\n")
            (out / JOURNAL).unlink()
        return folder
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None


def _begun(text: Path, number: int) -> Source:
    """A source of which nothing has been read. Raises ConfigError unless it is a file."""
    try:
        found = text.stat()
    except OSError as error:
        raise ConfigError(f"{text}: cannot be read: {error.strerror}") from None
    if text.is_dir():
        raise ConfigError(f"{text}: is a folder; name the files in it, e.g. {text}/*.txt")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", text.stem)[:80]
    return Source(f"{number:05}-{stem}", str(text), found.st_size, found.st_mtime_ns, {})


def _same_text(one: Source, other: Source) -> bool:
    return (one.name, one.size, one.modified_ns) == (other.name, other.size, other.modified_ns)


def _complete(out: Path, request: dict[str, Any], wanted: Sequence[Source]) -> TokenFolder:
    """The folder that is complete already. Raises ConfigError unless it holds just this."""
    folder = TokenFolder.open(out, str(out))
    same = json.loads((out / INDEX).read_text()).get("request") == request
    if same and len(folder.sources) == len(wanted) and all(map(_same_text, folder.sources, wanted)):
        return folder
    raise ConfigError(f"{out}: holds token files of other texts or options; name another folder, or remove this one")


@contextlib.contextmanager
def _journal(out: Path, request: dict[str, Any]) -> Iterator[tuple[dict[str, Source], Callable[[Any], None]]]:
    """The sources that are done, by name, and a function that notes another one. Raises ConfigError."""
    path = out / JOURNAL
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{out}: another prepare is writing here") from None

        def note(line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

        lines = read_lines(path)
        if not lines:
            file.truncate(0)
            note(request)
        elif lines[0] != request:
            raise ConfigError(
                f"{out}: was begun with another tokenizer or --validation; name another folder, or remove this one"
            )
        elif not path.read_bytes().endswith(b"\n"):
            file.write("\n")  # a line that was cut short
        done = [Source.from_json(line) for line in lines[1:]]
        yield {one.name: one for one in done}, note


def _write_source(
    text: Path, begun: Source, out: Path, tokenizer: Tokenizer, held_out: float, advance: Advance
) -> Source:
    """Make the token files of one source."""
    with contextlib.ExitStack() as closing:
        parts = {part: _PartWriter(out / f"{begun.name}.{part}", tokenizer, closing) for part in PARTS}
        done = 0.0
        for piece in read_pieces(text, held_out):
            parts[VALIDATION if piece.held_out else TRAIN].add(piece.text, piece.ends_document)
            advance((piece.done - done) * begun.size)
            done = piece.done
        found = {name: part.finish() for name, part in parts.items()}
    advance((1 - done) * begun.size)
    return Source(begun.name, begun.path, begun.size, begun.modified_ns, found)


class _PartWriter:
    """Writes the tokens of one source for training, or for validation."""

    def __init__(self, stem: Path, tokenizer: Tokenizer, closing: contextlib.ExitStack) -> None:
        self._tokens = Path(f"{stem}.tokens")
        self._documents = Path(f"{stem}.documents")
        self._tokenizer = tokenizer
        vocabulary = tokenizer.vocabulary
        self._dtype = vocabulary.dtype.newbyteorder("<")
        self._end = numpy.array([] if vocabulary.end is None else [vocabulary.end], self._dtype).tobytes()
        self._file = closing.enter_context(_aside(self._tokens).open("wb"))
        self._hash = hashlib.sha256()
        self._starts = array("Q")
        self._inside = False  # a document
        self._size = self._text_bytes = 0

    def add(self, text: str, ends_document: bool) -> None:
        """Add a document or a piece of it."""
        if not self._inside:
            self._starts.append(self._size // self._dtype.itemsize)
        self._inside = not ends_document
        self._text_bytes += len(text.encode())
        tokens = self._tokenizer.encode(text).astype(self._dtype).tobytes()
        self._put(tokens + self._end if ends_document else tokens)

    def finish(self) -> Part:
        """Rename the files to what they are called once they are whole."""
        starts = memoryview(self._starts).tobytes()  # every machine that torch runs on is little-endian
        assert len(starts) == len(self._starts) * OFFSETS.itemsize
        self._hash.update(starts)
        self._file.flush()
        os.fsync(self._file.fileno())
        _aside(self._tokens).replace(self._tokens)
        _write(self._documents, starts)
        tokens = self._size // self._dtype.itemsize
        return Part(tokens, len(self._starts), self._text_bytes, self._hash.hexdigest())

    def _put(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)
        self._size += len(content)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.writing")


def _write(path: Path, content: bytes) -> None:
    """Write a file so that at any moment it is whole or absent, even after a power cut."""
    _aside(path).write_bytes(content)
    fsync(_aside(path))
    _aside(path).replace(path)
    fsync(path.parent)


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

"""Token files: texts as flat arrays of tokens, with an index that says what they hold. Imports no torch.

A folder of token files has, for each source, the files NAME.train.tokens and NAME.validation.tokens, flat arrays of
uint8, uint16 or uint32, and beside each the starts of its documents (.documents, uint64). tokens.json says which belong
to the folder, and has their tokenizer and a fingerprint of all that they hold. It is written last: a folder without it
is not complete.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from laststep.config.errors import ConfigError
from laststep.data.tokenizer import BYTES, Bytes, FromFile, Tokenizer, Tokens, Vocabulary
from laststep.say import command

if TYPE_CHECKING:
    from laststep.data.order import Indices

INDEX, TOKENIZER = "tokens.json", "tokenizer.json"
TRAIN, VALIDATION = PARTS = "train", "validation"
FORMAT = 1
HASHED_BYTES = 1 << 26  # a folder that is no larger is hashed each time that it is opened
OFFSETS = numpy.dtype("<u8")


@dataclass(frozen=True)
class Part:
    """What a source gave for training, or for validation."""

    tokens: int
    documents: int
    text_bytes: int  # of the text, in UTF-8
    sha256: str  # of its tokens and of the starts of its documents


@dataclass(frozen=True)
class Source:
    """A file of text that has become token files."""

    name: str  # of its files here
    path: str  # as it was when it was read
    size: int  # bytes
    modified_ns: int
    parts: dict[str, Part]  # by PARTS

    def as_json(self) -> dict[str, Any]:
        """For the index."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Source:
        """What `as_json` returned."""
        return cls(**{**found, "parts": {name: Part(**part) for name, part in found["parts"].items()}})


class TokenFolder:
    """A complete folder of token files."""

    def __init__(self, path: Path, vocabulary: Vocabulary, sources: Sequence[Source]) -> None:
        self.path = path
        self.vocabulary = vocabulary
        self.sources = sources

    @classmethod
    def open(cls, path: Path, source: str) -> TokenFolder:
        """Read the index, and compare the files' sizes with it. Raises ConfigError, which names `source`."""
        try:
            index = json.loads((path / INDEX).read_text())
            folder = cls(path, Vocabulary(**index["vocabulary"]), [Source.from_json(one) for one in index["sources"]])
            stated = index["fingerprint"]
        except (FileNotFoundError, NotADirectoryError):
            make = command(f"prepare TEXT... {path}")
            raise ConfigError(f"{source}: {path} is no complete folder of token files; make one: `{make}`") from None
        except OSError as error:
            raise ConfigError(f"{source}: {path / INDEX} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{source}: {path / INDEX} is damaged; prepare the texts again") from None
        if folder.fingerprint != stated:
            raise ConfigError(f"{source}: {path / INDEX} is damaged; prepare the texts again")
        folder._check_files(source)
        return folder

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens, their documents and their meaning, not of where the texts were."""
        held = [[one.parts[part].sha256 for part in PARTS] for one in self.sources]
        meaning = [FORMAT, self.vocabulary.sha256, self.vocabulary.size, self.vocabulary.end]
        return hashlib.sha256(json.dumps([meaning, held]).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The index."""
        sources = [one.as_json() for one in self.sources]
        vocabulary = dataclasses.asdict(self.vocabulary)
        return {"fingerprint": self.fingerprint, "vocabulary": vocabulary, "sources": sources}

    def tokenizer(self, source: str) -> Tokenizer:
        """What made the tokens. Raises ConfigError, which names `source`, when it is not the one that did."""
        if self.vocabulary.name == BYTES:
            return Bytes()
        path = self.path / TOKENIZER
        found = FromFile(path, f"{source}: {path}")
        if found.vocabulary.sha256 != self.vocabulary.sha256:
            raise ConfigError(f"{source}: {path} does not fit the data: they were made by another tokenizer")
        return found

    def stream(self, part: str) -> TokenStream:
        """All tokens for training, or for validation."""
        return TokenStream(self, part)

    def _check_files(self, source: str) -> None:
        """Raise ConfigError unless all files have the sizes in the index, and the hashes where that takes no time."""
        parts = {f"{one.name}.{name}": part for one in self.sources for name, part in one.parts.items()}
        width, total = self.vocabulary.dtype.itemsize, 0
        for name, part in parts.items():
            sizes = {"tokens": part.tokens * width, "documents": part.documents * OFFSETS.itemsize}
            for ending, size in sizes.items():
                file, total = self.path / f"{name}.{ending}", total + size
                if not file.is_file() or file.stat().st_size != size:
                    raise ConfigError(f"{source}: {file} is missing or not whole; prepare the texts again")
        for name, part in parts.items() if total <= HASHED_BYTES else ():
            content = b"".join((self.path / f"{name}.{ending}").read_bytes() for ending in ("tokens", "documents"))
            if hashlib.sha256(content).hexdigest() != part.sha256:
                raise ConfigError(f"{source}: {self.path / name}.tokens was changed; prepare the texts again")


class TokenStream:
    """The tokens of one part of a folder, all sources one after another. Files are mapped into memory, when needed."""

    def __init__(self, folder: TokenFolder, part: str) -> None:
        self._folder, self._part = folder, part
        self._parts = [one.parts[part] for one in folder.sources]
        self._starts = numpy.cumsum([0, *(part.tokens for part in self._parts)]).tolist()
        self._mapped: dict[int, Tokens] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def text_bytes(self) -> int:
        """Bytes of the text, in UTF-8."""
        return sum(part.text_bytes for part in self._parts)

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens from `start` to `stop`, a copy."""
        found, number = [], bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            until = min(stop, self._starts[number + 1])
            if until > start:
                offset = self._starts[number]
                found.append(self._map(number)[start - offset : until - offset])
            start, number = until, number + 1
        return numpy.concatenate(found) if found else numpy.empty(0, self._folder.vocabulary.dtype)

    def positions(self, start: int, stop: int) -> Indices:
        """The position of each of these tokens in its document, or since `start` where that is later."""
        places = numpy.arange(start, stop)
        begins = self._documents[numpy.searchsorted(self._documents, places, "right") - 1]
        return places - numpy.maximum(begins, start)

    @cached_property
    def _documents(self) -> Indices:
        """Where each document starts, and each source."""
        found = [numpy.zeros(1, numpy.int64)]
        for one, part, offset in zip(self._folder.sources, self._parts, self._starts):
            if part.documents:
                found.append(numpy.fromfile(self._file(one, "documents"), OFFSETS).astype(numpy.int64) + offset)
        return numpy.concatenate(found)

    def _map(self, number: int) -> Tokens:
        if number not in self._mapped:
            file = self._file(self._folder.sources[number], "tokens")
            self._mapped[number] = numpy.memmap(file, self._folder.vocabulary.dtype.newbyteorder("<"), mode="r")
        return self._mapped[number]

    def _file(self, one: Source, ending: str) -> Path:
        return self._folder.path / f"{one.name}.{self._part}.{ending}"

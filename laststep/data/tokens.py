"""Tokenizers and token files: flat arrays of tokens, with an index that says what they hold. Imports no torch.

Tokens are bytes by default, or those of a tokenizer of the `tokenizers` library, from its file.

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
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import numpy.typing

from laststep.config.errors import ConfigError, first_line, nearest
from laststep.config.schema import Data
from laststep.data.catalog import CLASSICS, DATASETS, TEXTS
from laststep.say import command

if TYPE_CHECKING:
    from laststep.data.order import Indices


Tokens = numpy.typing.NDArray[Any]  # of an unsigned integer type
BYTES = "bytes"
# The names by which tokenizers in use call the token that ends a document.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@dataclass(frozen=True)
class Vocabulary:
    """What must agree between token files and whatever reads them."""

    name: str  # "bytes", or the file's name
    sha256: str | None  # of the tokenizer's file
    size: int  # tokens are numbers below this
    end: int | None  # the token after each document

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The smallest type that holds every token."""
        kinds = (numpy.uint8, numpy.uint16, numpy.uint32)
        return numpy.dtype(next(kind for kind in kinds if self.size <= numpy.iinfo(kind).max + 1))

    def same_tokens(self, other: Vocabulary) -> bool:
        """Whether a number means the same text in both."""
        return (self.sha256, self.size) == (other.sha256, other.size)

    def __str__(self) -> str:
        return f"{self.name} ({self.size:,} tokens)"


class Bytes:
    """A token is a byte of UTF-8. Byte 0, which text does not have, ends a document."""

    vocabulary = Vocabulary(BYTES, None, 256, 0)

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, without one for its end."""
        return numpy.frombuffer(text.encode(), dtype=numpy.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens. Bytes that are no UTF-8 become replacement characters."""
        return bytes(tokens).decode(errors="replace")


class FromFile:
    """A tokenizer of the `tokenizers` library, from its tokenizer.json."""

    def __init__(self, path: Path, source: str) -> None:
        """Raises ConfigError, which names `source`, when it cannot be read."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise ConfigError(f"{source}: needs the tokenizers library: pip install tokenizers") from None
        try:
            self._library = Library.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"{source}: is no file of the tokenizers library, such as tokenizer.json ({first_line(error)})"
            ) from None
        known = self._library.get_vocab(with_added_tokens=True)
        ends = (known[name] for name in END_TOKENS if name in known)
        size = max(known.values(), default=0) + 1
        self.vocabulary = Vocabulary(path.name, hashlib.sha256(content).hexdigest(), size, next(ends, None))

    def encode(self, text: str) -> Tokens:
        """As Bytes.encode."""
        found = self._library.encode(text, add_special_tokens=False).ids
        return numpy.asarray(found, dtype=self.vocabulary.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        """As Bytes.decode."""
        return str(self._library.decode(list(tokens)))


Tokenizer = Bytes | FromFile


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


@dataclass(eq=False)
class TokenFolder:
    """A complete folder of token files."""

    path: Path
    vocabulary: Vocabulary
    sources: Sequence[Source]

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

    def place_of(self, token: int) -> tuple[Path, int]:
        """The file that holds a token, and the number of its document there, from 0."""
        number = bisect.bisect_right(self._starts, token) - 1
        begins = self._documents
        first = int(numpy.searchsorted(begins, self._starts[number], "right"))
        here = int(numpy.searchsorted(begins, token, "right"))
        return self._file(self._folder.sources[number], "tokens"), max(0, here - first)

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


ARGS = {"window": 256, "mask_documents": False, "sources": {}}  # with their defaults


@dataclass(frozen=True)
class Corpus:
    """Open token files, and how they are cut."""

    folders: tuple[TokenFolder, ...]
    weights: tuple[float, ...]  # of the folders' tokens
    window: int  # tokens of a sample
    mask_documents: bool  # whether attention stays within a document

    @classmethod
    def open(cls, data: Data) -> Corpus:
        """What `data` names. Raises ConfigError."""
        args = _checked(data)
        sources = args["sources"]
        named = "data.root" if data.name == "tokens" else "data.name"
        root = CLASSICS if data.name == "classics" else Path(os.path.expanduser(data.root))
        paths = [root / name for name in sources] or [root]
        labels = [f"data.args.sources.{name}" for name in sources] or [f"{named}={getattr(data, named[5:])}"]
        folders = tuple(TokenFolder.open(path, label) for path, label in zip(paths, labels))
        for label, folder in zip(labels, folders):
            if not folder.vocabulary.same_tokens(folders[0].vocabulary):
                raise ConfigError(
                    f"{label}: was made with tokenizer {folder.vocabulary}, {labels[0]} with {folders[0].vocabulary}; "
                    "prepare all with the same"
                )
        corpus = cls(folders, tuple(sources.values()) or (1.0,), args["window"], args["mask_documents"])
        corpus._check_window(labels)
        return corpus

    @property
    def vocabulary(self) -> Vocabulary:
        """The same in all folders."""
        return self.folders[0].vocabulary

    @property
    def fingerprint(self) -> str:
        """A hash of all that the folders hold."""
        found = [folder.fingerprint for folder in self.folders]
        return found[0] if len(found) == 1 else hashlib.sha256(json.dumps(found).encode()).hexdigest()

    @property
    def validation_bytes_per_token(self) -> float:
        """Bytes of text per token to validate with."""
        streams = [folder.stream(VALIDATION) for folder in self.folders]
        return sum(stream.text_bytes for stream in streams) / max(1, sum(map(len, streams)))

    def windows(self, part: str) -> list[int]:
        """Whole windows of each folder. Each has one more token, which the next window begins with."""
        return [max(0, len(folder.stream(part)) - 1) // self.window for folder in self.folders]

    def _check_window(self, labels: Sequence[str]) -> None:
        for part in PARTS:
            counts = self.windows(part)
            if (min if part == TRAIN else max)(counts):
                continue
            number = counts.index(0)
            tokens = len(self.folders[number].stream(part))
            purpose = "train on" if part == TRAIN else "validate with"
            raise ConfigError(
                f"data.args.window={self.window}: longer than the data: {labels[number]} has {tokens:,} tokens to "
                f"{purpose}; use a shorter window, or more text"
            )


@dataclass(frozen=True)
class Mixture:
    """Which window each sample of an epoch is: a pure function of the sources' sizes and weights.

    An epoch has each source's windows in proportion to its weight, and every window at least once: the source that is
    largest for its weight once, the others as often as it takes.
    """

    sizes: tuple[int, ...]  # windows of each source
    starts: tuple[int, ...]  # the first sample of each source, and the number of samples

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float]) -> Mixture:
        """The mixture of sources of these sizes. One without a window has no sample."""
        samples = max(size / weight for size, weight in zip(sizes, weights))
        counts = [max(size, round(samples * weight)) if size else 0 for size, weight in zip(sizes, weights)]
        return cls(tuple(sizes), tuple(sum(counts[:number]) for number in range(len(counts) + 1)))

    def __len__(self) -> int:
        return self.starts[-1]

    def window(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the number of its window there."""
        source = next(number for number in range(len(self.sizes)) if sample < self.starts[number + 1])
        return source, (sample - self.starts[source]) % self.sizes[source]


def _checked(data: Data) -> dict[str, Any]:
    """data.args with their defaults. Raises ConfigError, also for a data set that is no text."""
    if data.name not in TEXTS:
        hint = "holds images" if data.name in DATASETS else f"no such data; {nearest(data.name, TEXTS)}"
        raise ConfigError(f"data.name={data.name}: {hint}; task=language takes {' or '.join(TEXTS)}")
    for name in data.args:
        if name not in ARGS:
            raise ConfigError(f"data.args.{name}: {data.name} has no such option; {nearest(name, list(ARGS))}")
    args = {**ARGS, **data.args}
    window, masks, sources = args["window"], args["mask_documents"], args["sources"]
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"data.args.window={window}: must be a positive integer, in tokens")
    if not isinstance(masks, bool):
        raise ConfigError(f"data.args.mask_documents={masks}: must be true or false")
    if not isinstance(sources, dict) or (sources and data.name == "classics"):
        raise ConfigError(
            f"data.args.sources={sources}: must be weights of folders in data.root, with data.name=tokens, e.g. "
            "data.args.sources.web=0.7"
        )
    for name, weight in sources.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(f"data.args.sources.{name}={weight}: must be a weight above 0")
    return args

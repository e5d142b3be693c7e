"""Tokenizers: bytes by default, or any of the `tokenizers` library from its file. Imports no torch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from laststep.config.errors import ConfigError, first_line

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


class Tokenizer(ABC):
    """Turns text into tokens and back."""

    vocabulary: Vocabulary

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """The tokens of a text, without one for its end."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens. Bytes that are no UTF-8 become replacement characters."""


class Bytes(Tokenizer):
    """A token is a byte of UTF-8. Byte 0, which text does not have, ends a document."""

    vocabulary = Vocabulary(BYTES, None, 256, 0)

    def encode(self, text: str) -> Tokens:
        """See Tokenizer."""
        return numpy.frombuffer(text.encode(), dtype=numpy.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """See Tokenizer."""
        return bytes(tokens).decode(errors="replace")


class FromFile(Tokenizer):
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
        """See Tokenizer."""
        found = self._library.encode(text, add_special_tokens=False).ids
        return numpy.asarray(found, dtype=self.vocabulary.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        """See Tokenizer."""
        return str(self._library.decode(list(tokens)))

"""The text that a language model is trained on: one folder of token files, or several in given shares.

Imports no torch: a command checks here what it is given, before it starts anything.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laststep.config.errors import ConfigError, nearest
from laststep.config.schema import Data
from laststep.data.catalog import CLASSICS, DATASETS, TEXTS
from laststep.data.tokenizer import Vocabulary
from laststep.data.tokens import PARTS, TRAIN, VALIDATION, TokenFolder

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

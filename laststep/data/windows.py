"""Windows of a stream of tokens as a data set: a sample is a window, and in which order they come is Order's."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from laststep.data.tokenizer import Tokens
from laststep.data.tokens import TRAIN, Corpus, Mixture

IN_MEMORY_BYTES = 1 << 27  # windows that take no more are held in memory, and their batches gathered there


def open_windows(corpus: Corpus, part: str) -> Dataset[Any]:
    """The windows to train on, or to validate with.

    A sample is (tokens (window + 1),), or with `mask_documents` (tokens (window + 1), positions (window)).
    """
    windows = Windows(corpus, part)
    if not len(windows) or len(windows) * sum(tensor.nbytes for tensor in windows[0]) > IN_MEMORY_BYTES:
        return windows
    samples = [windows[number] for number in range(len(windows))]
    return TensorDataset(*(torch.stack(tensors) for tensors in zip(*samples)))


class Windows(Dataset[Any]):
    """Windows that are read from the token files when they are asked for."""

    def __init__(self, corpus: Corpus, part: str) -> None:
        self.corpus = corpus
        self.streams = [folder.stream(part) for folder in corpus.folders]
        sizes = corpus.windows(part)
        # Validation has each window once: its mean is over the text, not over the mixture.
        self.mixture = Mixture.of(sizes, corpus.weights if part == TRAIN else [max(1, size) for size in sizes])

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source, number = self.mixture.window(index)
        start, stop = number * self.corpus.window, (number + 1) * self.corpus.window
        stream = self.streams[source]
        tokens = as_tensor(stream.read(start, stop + 1))
        if not self.corpus.mask_documents:
            return (tokens,)
        return tokens, torch.from_numpy(stream.positions(start, stop).astype(numpy.int32))


def as_tensor(tokens: Tokens) -> Tensor:
    """Tokens in a type with which torch can do everything."""
    return torch.from_numpy(tokens if tokens.dtype == numpy.uint8 else tokens.astype(numpy.int32))

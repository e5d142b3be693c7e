"""Batches of a data set in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import numpy
import torch
from torch import Tensor

from laststep.data.order import Indices
from laststep.data.pixels import Images

BatchKey = tuple[int, Indices | Sequence[int]]  # epoch, sample indices
# The most batches, and the most bytes, that are fetched together.
BLOCK, BLOCK_BYTES = 256, 4 << 20
ALIGNED = 64  # bytes: torch's tensors in the CPU's memory begin at a multiple of this


class MemoryBatches:
    """Batches of a data set in memory, indexed on the device without loading single samples. On a CPU small batches are
    fetched many at a time: a call that fetches one takes longer than the copy."""

    def __init__(self, dataset: Any, seed: int, keys: Iterable[BatchKey], device: torch.device) -> None:
        self.dataset = dataset
        self.seed = seed
        self.keys = keys
        self.device = device
        self.tensors = [tensor.to(device) for tensor in dataset.tensors]

    def __iter__(self) -> Iterator[list[Tensor]]:
        for epoch, parts in self._blocks():
            rows = torch.from_numpy(numpy.concatenate(parts) if len(parts) > 1 else parts[0])
            if self.device.type == "cuda":
                rows = rows.pin_memory().to(self.device, non_blocking=True)
            count = len(parts[0])
            draws = self.dataset.draws(self.seed, epoch, self.device) if isinstance(self.dataset, Images) else None
            columns = [tensor.index_select(0, rows).split(count) for tensor in self.tensors]
            for rows_of, *views in zip(rows.split(count), *columns):
                # .data: a change in place of one batch must not look to autograd like a change of another.
                batch = [view.data for view in views]
                if isinstance(self.dataset, Images):
                    batch[0] = self.dataset.resized_and_augmented(batch[0], None if draws is None else draws[rows_of])
                yield batch

    def _blocks(self) -> Iterator[tuple[int, list[Indices]]]:
        """The keys, those that are fetched together in one list: of one epoch, and with as many indices each."""
        keys = ((epoch, numpy.asarray(indices)) for epoch, indices in self.keys)
        for (epoch, count), run in groupby(keys, lambda key: (key[0], len(key[1]))):
            at_once = self._at_once(count)
            while parts := [indices for _, indices in islice(run, at_once)]:
                yield epoch, parts

    def _at_once(self, count: int) -> int:
        """How many batches of `count` samples to fetch together. Each begins where a tensor of its own could: a sum of
        products may round otherwise at another address."""
        sizes = [count * tensor.nbytes // max(1, len(tensor)) for tensor in self.tensors]
        if self.device.type != "cpu" or any(size % ALIGNED for size in sizes):
            return 1
        return max(1, min(BLOCK, BLOCK_BYTES // max(1, sum(sizes))))

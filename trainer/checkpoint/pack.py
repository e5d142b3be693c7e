"""A nested state as a small structure and one run of bytes, which any number of ranks may write and read in stripes.

The run is made of the tensors, in the order in which the state is walked, each at an offset aligned to ALIGNMENT and
laid out as it lies in memory, so that packing is plain copying, for channels_last too. The structure is the state with
each tensor replaced by its twin on the "meta" device, which has shape, strides and dtype and no data.
"""

from __future__ import annotations

import copy
import io
import os
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.store import CHUNK, STRUCTURE, CheckpointError, Manifest

READERS = 4  # threads
ALIGNMENT = 64  # bytes: a multiple of every dtype's size, and a cache line


class Packed:
    """A state's structure and run of bytes. It references the tensors and copies nothing.

    Thousands of small tensors are common, and the training waits for `copy`: it does no more than it must for each.
    """

    def __init__(self, state: Any) -> None:
        self._tensors: list[Tensor] = []
        self._dense: list[bool] = []  # whether the tensor's bytes lie in memory without gaps and overlaps
        self.structure = map_tensors(state, self._twin)
        *self._offsets, self.bytes = accumulate((_aligned(t.nbytes) for t in self._tensors), initial=0)

    def copy(self, start: int, stop: int, into: Tensor) -> None:
        """Copy bytes [start, stop) of the run into a uint8 tensor of that length on the CPU.

        Done when it returns, from a GPU too.
        """
        done = start
        for number in range(max(0, bisect_right(self._offsets, start) - 1), len(self._offsets)):
            offset, tensor = self._offsets[number], self._tensors[number]
            if offset >= stop:
                break
            source = _bytes_of(tensor if self._dense[number] else torch.empty_like(tensor).copy_(tensor))
            begin = max(start, offset)
            end = max(begin, min(stop, offset + tensor.nbytes))
            if end - begin < tensor.nbytes:
                source = source[begin - offset : end - offset]
            if begin > done:
                into[done - start : begin - start] = 0  # the gap behind the tensor before
            into[begin - start : end - start].copy_(source, non_blocking=True)
            done = end
        into[done - start :] = 0
        for device in {tensor.device for tensor in self._tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _twin(self, tensor: Tensor) -> Tensor:
        twin = torch.empty_like(tensor, device="meta")  # which never has gaps or overlaps
        self._tensors.append(tensor.detach())
        self._dense.append(twin.stride() == tensor.stride())
        return twin


def dumped(structure: Any) -> memoryview:
    """A structure as it is written. In memory: torch.save would hide what the disk has to say in an error of its own.

    Raises what torch.load has to say of a state that it would never give back.
    """
    data = io.BytesIO()
    torch.save(structure, data)
    data.seek(0)
    torch.load(data, weights_only=True)
    return data.getbuffer()


def load(folder: Path, manifest: Manifest) -> Any:
    """The whole state, on the CPU, of the checkpoint in `folder`, however many shards it has. Raises CheckpointError.

    It does not compare hashes: `CheckpointStore.verify` does.
    """
    try:
        structure = torch.load(folder / STRUCTURE, weights_only=True)
        tensors: list[Tensor] = []
        state = map_tensors(structure, lambda twin: _new(twin, tensors))
        with ExitStack() as files:
            _read([files.enter_context((folder / name).open("rb", buffering=0)) for name in manifest.shards], tensors)
        return state
    except Exception as error:  # whatever a damaged pickle or a failing disk makes of itself
        raise CheckpointError(f"{folder.name}: could not be loaded: {error}") from error


def _new(twin: Tensor, tensors: list[Tensor]) -> Tensor:
    """Memory for a tensor."""
    tensors.append(torch.empty_strided(twin.size(), twin.stride(), dtype=twin.dtype))
    return tensors[-1]


def _read(shards: list[FileIO], tensors: list[Tensor]) -> None:
    """Fill the tensors from the run of bytes that the shards make up. Raises ValueError when their lengths differ.

    Several threads read: what takes long is memory new to the process, which one fills at half the speed of two.
    """
    *offsets, count = accumulate((_aligned(t.nbytes) for t in tensors), initial=0)
    *starts, there = accumulate((os.fstat(shard.fileno()).st_size for shard in shards), initial=0)
    if there != count:
        raise ValueError(f"its shards hold {there} bytes, its structure says {count}")
    pieces = iter(
        [
            (offset + begin, memory[begin : begin + CHUNK])
            for offset, memory in zip(offsets, (_bytes_of(tensor).numpy().data for tensor in tensors))
            for begin in range(0, len(memory), CHUNK)
        ]
    )

    def read(_: int) -> None:
        for offset, piece in pieces:  # of which each thread takes the next
            while piece:
                number = bisect_right(starts, offset) - 1
                count = os.preadv(shards[number].fileno(), [piece], offset - starts[number])
                if not count:
                    raise ValueError("a shard was cut short")
                offset, piece = offset + count, piece[count:]

    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(read, range(READERS)):
            pass


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a nested state down to its leaves, each tensor replaced by what `change` makes of it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps its class, and the _metadata of a module's state_dict
        for key, item in value.items():
            mapped[key] = map_tensors(item, change)
        return mapped
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, change) for item in value])
    return copy.deepcopy(value)


def _bytes_of(dense: Tensor) -> Tensor:
    """The bytes of a tensor without gaps and overlaps, as they lie in memory; a view."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT

"""Packs a nested state into a small structure and one sequence of bytes, which any number of ranks can write and read.

The bytes are those of the tensors, in the order in which the state is traversed. Each tensor starts at a multiple of
ALIGNMENT and keeps its memory layout, so packing is plain copying, even for channels_last. The structure is the state
with each tensor replaced by one on the "meta" device, which has the shape, strides and dtype but no data.
"""

from __future__ import annotations

import copy
import io
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.files import READ_BYTES, READING_THREADS
from trainer.checkpoint.store import STRUCTURE, CheckpointError, Manifest
from trainer.checkpoint.stripes import ALIGNMENT


class Packed:
    """The structure and the bytes of a state. It references the tensors and copies nothing until asked.

    Thousands of small tensors are common and training waits for `copy`, so the work per tensor is kept to a minimum.
    """

    def __init__(self, state: Any) -> None:
        self._tensors: list[Tensor] = []
        self._dense: list[bool] = []  # whether a tensor occupies its memory without gaps and overlaps
        self.structure = map_tensors(state, self._add)
        *self._offsets, self.bytes = accumulate((_aligned(t.nbytes) for t in self._tensors), initial=0)

    def copy(self, start: int, stop: int, into: Tensor) -> None:
        """Copy bytes [start, stop) of the state into `into`, a uint8 tensor of that length on the CPU.

        The copy is complete when this returns, even from a GPU.
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
                into[done - start : begin - start] = 0  # the padding after the previous tensor
            into[begin - start : end - start].copy_(source, non_blocking=True)
            done = end
        into[done - start :] = 0
        for device in {tensor.device for tensor in self._tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _add(self, tensor: Tensor) -> Tensor:
        """Note a tensor; returns its stand-in for the structure."""
        stand_in = torch.empty_like(tensor, device="meta")  # never has gaps or overlaps
        self._tensors.append(tensor.detach())
        self._dense.append(stand_in.stride() == tensor.stride())
        return stand_in


def serialized_structure(structure: Any) -> memoryview:
    """The contents of structure.pt. Serialized in memory, since torch.save hides the disk's errors behind its own.

    Raises the error of torch.load if the structure could be saved but never loaded again.
    """
    data = io.BytesIO()
    torch.save(structure, data)
    data.seek(0)
    torch.load(data, weights_only=True)
    return data.getbuffer()


class Layout:
    """Where the tensors of a structure lie in the bytes of its state."""

    def __init__(self, structure: Any) -> None:
        self.structure = structure
        self.stand_ins = _tensors_of(structure)
        *offsets, self.bytes = accumulate((_aligned(t.nbytes) for t in self.stand_ins), initial=0)
        self._offset_of = {id(stand_in): offset for stand_in, offset in zip(self.stand_ins, offsets)}

    def make(self, part: Any, tensor_for: Callable[[Tensor], Tensor]) -> tuple[Any, list[tuple[int, Tensor]]]:
        """`part` of the structure with tensors in place of its stand-ins, and these tensors, each with its offset.

        `tensor_for` a stand-in must have its layout, see `is_laid_out_as`. Their bytes are still to be filled in.
        """
        tensors: list[tuple[int, Tensor]] = []

        def replace(stand_in: Tensor) -> Tensor:
            tensor = tensor_for(stand_in)
            tensors.append((self._offset_of[id(stand_in)], tensor.detach()))
            return tensor

        return map_tensors(part, replace), tensors


def load(folder: Path, manifest: Manifest, part: Callable[[Any], Any] = lambda state: state) -> Any:
    """The state in the checkpoint `folder`, on the CPU, from any number of shards. Raises CheckpointError.

    `part` picks from the state what to load: it gets the structure, and what it returns is filled. The other tensors
    take neither time nor memory. Does not compare hashes; `CheckpointStore.verify` does.
    """
    try:
        layout = Layout(torch.load(folder / STRUCTURE, weights_only=True))
        state, tensors = layout.make(part(layout.structure), empty_like)
        with ExitStack() as files:
            shards = [files.enter_context((folder / name).open("rb", buffering=0)) for name in manifest.shards]
            _fill(tensors, shards, layout.bytes)
        return state
    except Exception as error:  # a damaged pickle or a failing disk may raise anything
        raise CheckpointError(f"{folder.name}: could not be loaded: {error}") from error


def empty_like(stand_in: Tensor, device: torch.device | None = None) -> Tensor:
    """A new tensor with the layout of a stand-in, by default on the CPU."""
    return torch.empty_strided(stand_in.size(), stand_in.stride(), dtype=stand_in.dtype, device=device or "cpu")


def is_laid_out_as(tensor: Tensor, stand_in: Tensor) -> bool:
    """Whether the bytes of a tensor mean the same as those of a stand-in."""
    return (
        tensor.layout is torch.strided
        and not torch.nn.parameter.is_lazy(tensor)
        and (tensor.dtype, tensor.size()) == (stand_in.dtype, stand_in.size())
        and tensor.stride() == stand_in.stride()
        and not (tensor.is_conj() or tensor.is_neg())
    )


class Scatter:
    """Copies a run of bytes, piece by piece and in its order, into the tensors that it is made of."""

    def __init__(self, tensors: list[tuple[int, Tensor]]) -> None:
        """`tensors` with their offsets, in any order, none of them with gaps."""
        ordered = sorted(tensors, key=lambda each: each[0])
        self._offsets = [offset for offset, _ in ordered]
        self._bytes = [_bytes_of(tensor) for _, tensor in ordered]

    def write(self, start: int, piece: Tensor) -> None:
        """Copy a piece, a uint8 tensor on any device, which begins at byte `start`."""
        stop = start + piece.numel()
        for number in range(max(0, bisect_right(self._offsets, start) - 1), bisect_left(self._offsets, stop)):
            offset, target = self._offsets[number], self._bytes[number]
            begin, end = max(start, offset), min(stop, offset + target.numel())
            if begin < end:
                target[begin - offset : end - offset].copy_(piece[begin - start : end - start])


def _fill(tensors: list[tuple[int, Tensor]], shards: list[FileIO], expected: int) -> None:
    """Fill tensors, each with its offset, from the shards, which together hold `expected` bytes. Raises ValueError when
    the lengths differ.

    Several threads read, since first access to new memory takes most of the time and one thread is half as fast as two.
    """
    *starts, found = accumulate((os.fstat(shard.fileno()).st_size for shard in shards), initial=0)
    if found != expected:
        raise ValueError(f"its shards hold {found} bytes, its structure says {expected}")
    pieces = iter(
        [
            (offset + begin, memory[begin : begin + READ_BYTES])
            for offset, memory in ((offset, _bytes_of(tensor).numpy().data) for offset, tensor in tensors)
            for begin in range(0, len(memory), READ_BYTES)
        ]
    )

    def read(_: int) -> None:
        for offset, piece in pieces:  # the threads share one iterator: each takes the next piece
            while piece:
                number = bisect_right(starts, offset) - 1
                count = os.preadv(shards[number].fileno(), [piece], offset - starts[number])
                if not count:
                    raise ValueError("a shard is truncated")
                offset, piece = offset + count, piece[count:]

    with ThreadPoolExecutor(READING_THREADS) as pool:
        for _ in pool.map(read, range(READING_THREADS)):
            pass


def _tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a nested state, in the order in which it is traversed."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(state, note)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A deep copy of a nested state in which `change(tensor)` replaces each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps the class, and the _metadata of a module's state_dict
        for key, item in value.items():
            mapped[key] = map_tensors(item, change)
        return mapped
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, change) for item in value])
    return copy.deepcopy(value)


def _bytes_of(dense: Tensor) -> Tensor:
    """A view of the bytes of a tensor without gaps and overlaps, in memory order."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _aligned(count: int) -> int:
    """`count` rounded up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT

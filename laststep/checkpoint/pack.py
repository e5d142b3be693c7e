"""Packs a nested state into a small structure and one sequence of bytes, which any number of ranks can write and read.

The bytes are those of the tensors, in the order in which the state is traversed. Each tensor starts at a multiple of
ALIGNMENT and keeps its memory layout, so packing is plain copying, even for channels_last. The structure is the state
with each tensor replaced by one on the "meta" device, which has the shape, strides and dtype but no data.

Where a state is sharded (`laststep.checkpoint.shards`), the structure is that of the full tensors. The bytes of a shard
are its range of each tensor, one after another, each padded to a multiple of ALIGNMENT. So where a byte of a tensor is
stored is computed from the structure and the number of shards.

Parameters that are not trained (requires_grad=False), called fixed here, come after all other tensors, in files of
their own: `laststep.checkpoint.links`.
"""

from __future__ import annotations

import copy
import io
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laststep.checkpoint.files import ALIGNMENT, READING_THREADS, CheckpointError
from laststep.checkpoint.shards import is_distributed, local_of, range_of, shard_count
from laststep.checkpoint.store import FIXED_FORMAT, STRUCTURE, Manifest
from laststep.ranks.device import await_copies
from laststep.ranks.world import ShardPlace

WHOLE = ShardPlace(0, 1, 0, 1)
FIXED = "fixed"
FILL_BYTES = 4 << 20  # of the pieces in which several threads share the reading of a tensor


class Packed:
    """The structure and the bytes of a state. It references the tensors and copies nothing until asked.

    Thousands of small tensors are common and training waits for `copy`, so the work per tensor is kept to a minimum.
    """

    def __init__(self, state: Any, place: ShardPlace = WHOLE) -> None:
        """`place` says which shard of the state this is. Raises ValueError when its tensors are not cut like that."""
        self._place = place
        self._tensors: list[Tensor] = []
        # Of each tensor that has gaps or overlaps in memory, or another order than it is stored in: the strides to copy
        # it to first.
        self._strides: list[tuple[int, ...] | None] = []
        self._stand_ins: list[Tensor] = []
        self._sharded: list[int] = []  # the numbers of the tensors that are cut
        self._fixed: list[int] = []  # the numbers of those that training does not change
        fixed: list[bool] = []
        structure = map_tensors(state, lambda tensor: self._add(tensor, fixed))
        # What structure.pt holds, see `Layout.of`.
        self.structure = structure
        if self._fixed:
            self.structure = {"state": structure, "sharded": self._sharded, FIXED: self._fixed}
            order = sorted(range(len(fixed)), key=fixed.__getitem__)
            self._tensors, self._strides = [self._tensors[n] for n in order], [self._strides[n] for n in order]
        elif place.shards > 1:
            self.structure = {"state": structure, "sharded": self._sharded}
        *self._offsets, self.bytes = accumulate((aligned(t.nbytes) for t in self._tensors), initial=0)
        last = sum(fixed)
        self._changing = self.bytes - sum(
            aligned(tensor.nbytes) for tensor in self._tensors[len(self._tensors) - last :]
        )

    @property
    def changing(self) -> tuple[int, int]:
        """How many bytes are of tensors that training changes: here, and in shard 0. No other shard has more."""
        return self._changing, self._in_shard_0(fixed=False)

    @property
    def fixed(self) -> tuple[int, int]:
        """How many bytes are of fixed tensors, here and in shard 0."""
        return self.bytes - self._changing, self._in_shard_0(fixed=True)

    def _in_shard_0(self, fixed: bool) -> int:
        if self._place.shard == 0:
            return self.bytes - self._changing if fixed else self._changing
        layout, chosen = Layout(self._stand_ins, self._sharded, self._place.shards), set(self._fixed)
        return sum(aligned(end - begin) for number, begin, end in layout.held(0) if (number in chosen) is fixed)

    def copy(self, start: int, stop: int, into: Tensor) -> None:
        """Copy bytes [start, stop) of the state into `into`, a uint8 tensor of that length on the CPU.

        The copy is complete when this returns, even from a GPU.
        """
        done = start
        for number in range(max(0, bisect_right(self._offsets, start) - 1), len(self._offsets)):
            offset, tensor = self._offsets[number], self._tensors[number]
            if offset >= stop:
                break
            if (stride := self._strides[number]) is not None:
                tensor = tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
            source = _bytes_of(tensor)
            begin = max(start, offset)
            end = max(begin, min(stop, offset + tensor.nbytes))
            if end - begin < tensor.nbytes:
                source = source[begin - offset : end - offset]
            if begin > done:
                into[done - start : begin - start] = 0  # the padding after the previous tensor
            into[begin - start : end - start].copy_(source, non_blocking=True)
            done = end
        into[done - start :] = 0
        await_copies({tensor.device for tensor in self._tensors if tensor.is_cuda})

    def _add(self, tensor: Tensor, fixed: list[bool]) -> Tensor:
        """Note a tensor, and whether it is fixed if it is held here; returns its stand-in for the structure."""
        part, stays = local_of(tensor), is_fixed(tensor)
        if stays:
            self._fixed.append(len(self._stand_ins))
        if shards := shard_count(tensor):
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            stored = torch.empty(part.shape, device="meta")
            begin, end = range_of(stand_in, self._place.shard, self._place.shards)
            if shards != self._place.shards or part.nbytes != end - begin:
                raise ValueError(f"a tensor is cut into {shards} shards, the state into {self._place.shards}")
            self._sharded.append(len(self._stand_ins))
        else:
            stand_in = stored = torch.empty_like(part, device="meta")  # never has gaps or overlaps
        self._stand_ins.append(stand_in)
        if shards or self._place.shard == 0:
            fixed.append(stays)
            self._tensors.append(part)
            self._strides.append(None if stored.stride() == part.stride() else stored.stride())
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


def is_fixed(tensor: Tensor) -> bool:
    """Whether training does not change a tensor, as far as can be told."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def has_fixed(saved: Any) -> bool:
    """Whether what structure.pt holds names fixed tensors. The state itself has no such name."""
    return isinstance(saved, dict) and saved.keys() == {"state", "sharded", FIXED}


def is_wrapped(structure: Any) -> bool:
    """Whether a structure of `Packed` has the state's own under "state", beside what else is known of its tensors."""
    return has_fixed(structure) or (isinstance(structure, dict) and structure.keys() == {"state", "sharded"})


class Target(NamedTuple):
    """A tensor to fill, and where its bytes lie in the run of bytes of the full tensors."""

    number: int  # of the tensor in its structure
    offset: int
    tensor: Tensor  # of a sharded tensor, what this rank holds
    shards: int  # over which the full tensor is spread, see `shard_count`


class Layout:
    """Where the tensors of a state lie in its run of bytes, and where a shard holds them."""

    def __init__(
        self, structure: Any, sharded: Collection[int] = (), shards: int = 1, fixed: Collection[int] = ()
    ) -> None:
        """`sharded` has the numbers of the tensors that were cut into `shards`, `fixed` those that come last."""
        self.structure, self.sharded, self.shards = structure, frozenset(sharded), shards
        self.stand_ins = tensors_of(structure)
        last = frozenset(fixed)
        self._order = sorted(range(len(self.stand_ins)), key=last.__contains__)
        ends = accumulate((aligned(self.stand_ins[number].nbytes) for number in self._order), initial=0)
        begins = dict(zip(self._order, ends))
        self.offsets = [begins[number] for number in range(len(self.stand_ins))]
        self._fixed = {id(self.stand_ins[number]) for number in last}
        self._number_of = {id(stand_in): number for number, stand_in in enumerate(self.stand_ins)}

    @classmethod
    def of(cls, saved: Any, shards: int) -> Layout:
        """The layout of a state in this many shards, of which this is what structure.pt holds."""
        if has_fixed(saved):
            return cls(saved["state"], saved["sharded"], shards, saved[FIXED])
        return cls(saved) if shards == 1 else cls(saved["state"], saved["sharded"], shards)

    def is_fixed(self, stand_in: Tensor) -> bool:
        """Whether training does not change the tensor that this stands for."""
        return id(stand_in) in self._fixed

    @classmethod
    def read(cls, saved: Any, manifest: Manifest) -> Layout:
        """The layout that structure.pt describes. Raises ValueError when it does not fit the manifest."""
        if has_fixed(saved) != (manifest.format == FIXED_FORMAT):
            raise ValueError(f"its structure is not of format {manifest.format}")
        if isinstance(saved, dict) and saved.keys() > {"state", "sharded", FIXED}:
            # For some days a rescue from copies wrote the position beside these, and the bytes in another order.
            raise ValueError("its bytes are in another order than its structure says")
        layout = cls.of(saved, len(manifest.sharding) or 1)
        for shard, names in enumerate(manifest.shards_of_state):
            found, expected = sum(manifest.files[name]["bytes"] for name in names), layout.shard_bytes(shard)
            if found != expected:
                raise ValueError(f"its shards hold {found} bytes, its structure says {expected}")
        return layout

    def held(self, shard: int) -> Iterator[tuple[int, int, int]]:
        """What a shard holds, in the order of its bytes: the number of a tensor, and where the range of its bytes
        begins and ends. Each range is padded to a multiple of ALIGNMENT."""
        for number in self._order:
            stand_in = self.stand_ins[number]
            if number in self.sharded:
                begin, end = range_of(stand_in, shard, self.shards)
            else:
                begin, end = 0, 0 if shard else stand_in.nbytes
            if begin < end:
                yield number, begin, end

    def shard_bytes(self, shard: int) -> int:
        """The size of a shard."""
        return sum(aligned(end - begin) for _, begin, end in self.held(shard))

    def make(self, part: Any, tensor_for: Callable[[Tensor], Tensor], rank: int = 0) -> tuple[Any, list[Target]]:
        """`part` of the structure with tensors in place of its stand-ins, and these tensors, to be filled.

        `tensor_for` a stand-in must have its layout, see `is_laid_out_as`; of a sharded one this is what `rank` holds.
        """
        targets: list[Target] = []

        def replace(stand_in: Tensor) -> Tensor:
            tensor, number = tensor_for(stand_in), self._number_of[id(stand_in)]
            shards = shard_count(tensor)
            begin = range_of(stand_in, rank % shards, shards)[0] if shards else 0
            targets.append(Target(number, self.offsets[number] + begin, local_of(tensor), shards))
            return tensor

        return map_tensors(part, replace), targets


def load(folder: Path, manifest: Manifest, part: Callable[[Layout], Any] = lambda layout: layout.structure) -> Any:
    """The state in the checkpoint `folder`, on the CPU, from any number of shards. Raises CheckpointError.

    `part` picks from the structure what to load: what it returns is filled. The other tensors take neither time nor
    memory. Does not compare hashes; `CheckpointStore.verify` does.
    """
    try:
        layout = Layout.read(torch.load(folder / STRUCTURE, weights_only=True), manifest)
        state, targets = layout.make(part(layout), empty_like)
        _fill(layout, targets, [folder / name for name in manifest.shards])
        return state
    except Exception as error:  # a damaged pickle or a failing disk may raise anything
        raise CheckpointError(f"{folder.name}: could not be loaded: {error}") from error


def empty_like(stand_in: Tensor, device: torch.device | None = None) -> Tensor:
    """A new tensor with the layout of a stand-in, by default on the CPU."""
    return torch.empty_strided(stand_in.size(), stand_in.stride(), dtype=stand_in.dtype, device=device or "cpu")


def is_laid_out_as(tensor: Tensor, stand_in: Tensor) -> bool:
    """Whether the bytes of a tensor mean the same as those of a stand-in. Those of a sharded one are in C order."""
    return (
        tensor.layout is torch.strided
        and not torch.nn.parameter.is_lazy(tensor)
        and (tensor.dtype, tensor.size()) == (stand_in.dtype, stand_in.size())
        and tensor.stride() == stand_in.stride()
        and (stand_in.is_contiguous() and local_of(tensor).is_contiguous() if is_distributed(tensor) else True)
        and not (tensor.is_conj() or tensor.is_neg())
    )


class Scatter:
    """Copies pieces of a run of bytes into the tensors that it is made of. Of a sharded one, what this rank holds."""

    def __init__(self, targets: list[Target]) -> None:
        """`targets` in any order, none of them with gaps."""
        ordered = sorted((each for each in targets if each.tensor.numel()), key=lambda each: each.offset)
        self._offsets = [each.offset for each in ordered]
        self._bytes = [_bytes_of(each.tensor) for each in ordered]

    def write(self, start: int, piece: Tensor) -> None:
        """Copy a piece, a uint8 tensor on any device, which begins at byte `start`."""
        stop = start + piece.numel()
        for number in range(max(0, bisect_right(self._offsets, start) - 1), bisect_left(self._offsets, stop)):
            offset, target = self._offsets[number], self._bytes[number]
            begin, end = max(start, offset), min(stop, offset + target.numel())
            if begin < end:
                target[begin - offset : end - offset].copy_(piece[begin - start : end - start])


def _fill(layout: Layout, targets: list[Target], files: list[Path]) -> None:
    """Fill tensors from the files, which together hold all bytes of the shards. Raises ValueError when the lengths
    differ.

    Several threads read, since first access to new memory takes most of the time and one thread is half as fast as two.
    Each has one file open at a time: there may be more than a process may open.
    """
    *starts, found = accumulate((file.stat().st_size for file in files), initial=0)
    memory: dict[int, list[memoryview]] = {}
    for target in targets:
        memory.setdefault(target.number, []).append(_bytes_of(target.tensor).numpy().data)
    ranges, expected = list[tuple[int, memoryview]](), 0
    for shard in range(layout.shards):
        for number, begin, end in layout.held(shard):
            ranges += [(expected, whole[begin:end]) for whole in memory.get(number, [])]
            expected += aligned(end - begin)
    if found != expected:
        raise ValueError(f"its shards hold {found} bytes, its structure says {expected}")
    pieces = iter(
        [
            (stored + begin, part[begin : begin + FILL_BYTES])
            for stored, part in ranges
            for begin in range(0, len(part), FILL_BYTES)
        ]
    )

    def read(_: int) -> None:
        with ExitStack() as own:
            number = -1
            for offset, piece in pieces:  # the threads share one iterator: each takes the next piece
                while piece:
                    if (needed := bisect_right(starts, offset) - 1) != number:
                        own.close()
                        number, file = needed, own.enter_context(files[needed].open("rb", buffering=0))
                    count = os.preadv(file.fileno(), [piece], offset - starts[number])
                    if not count:
                        raise ValueError("a shard is truncated")
                    offset, piece = offset + count, piece[count:]

    with ThreadPoolExecutor(READING_THREADS) as pool:
        for _ in pool.map(read, range(READING_THREADS)):
            pass


def tensors_of(state: Any) -> list[Tensor]:
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


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT

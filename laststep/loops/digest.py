"""A digest of the state: 64 bits for weights, buffers and the optimiser's tensors, the same for any sharding.

Each element's bits, as an integer, are multiplied by a weight that follows from the tensor's name and the element's
place in the whole tensor, and all products are added modulo 2^64. So two elements that change places are seen, and two
equal changes; no order of the sum matters; and the digests of the shards of a state add up to that of the whole.
It is computed on the device, with the step, and nobody waits for it: it is read with what the step has measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from laststep.checkpoint.shards import is_distributed, local_of, range_of, shard_count
from laststep.data.order import Indices
from laststep.loops.base_weights import INTEGERS
from laststep.loops.registered import leaves_of
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace

HIGH, LOW = "digest high", "digest low"  # among what a step measures: a float64 holds 32 bits of it exactly
BLOCK = 1 << 16  # elements; a tensor that is no larger has its weights kept between digests
CHUNK = 1 << 6  # blocks of a larger tensor that are multiplied at a time: 32 MB of products
MOST_KEPT = 1 << 23  # weights, of 8 bytes


class _Piece(NamedTuple):
    """What this rank adds of one tensor."""

    offset: int  # of its first element in the whole tensor
    factor: int  # of the tensor: odd


class StateDigest:
    """Computes the digest of one loop's state, on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = torch.zeros((), dtype=torch.int64, device=device)
        self._tables: dict[torch.device, Tensor] = {}
        self._known: dict[tuple[Any, ...], tuple[torch.device, Tensor]] = {}  # weights of small tensors, by layout

    def of(self, state: Any, place: ShardPlace) -> Tensor | None:
        """The digest of what this rank holds of a state: an int64 scalar on the device. None if it has no tensor."""
        total: Tensor | None = None
        groups: dict[tuple[torch.device, int], list[tuple[str, Tensor, Tensor]]] = {}
        for name, leaf in leaves_of(state):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
                groups.setdefault((leaf.device, _width(leaf)), []).append((name, leaf, _bits(local_of(leaf))))
        with torch.no_grad():
            for (device, width), found in groups.items():
                held = [each for each in found if place.shard == 0 or shard_count(each[1])]
                small = [each for each in held if _count(each[1]) <= BLOCK and each[2].numel()]
                kept = sum(bits.numel() for *_, bits in small) <= MOST_KEPT
                parts = [self._of_small(device, width, small, place)] if small and kept else []
                parts += [self._of_large(each, place) for each in held if not kept or _count(each[1]) > BLOCK]
                for part in parts:
                    if part.device != self._device:  # such as Adam's count of steps: it is here already
                        part = torch.full((), int(part), dtype=torch.int64, device=self._device)
                    total = part if total is None else total + part
        self._last = torch.zeros_like(self._last) if total is None else total
        return total

    def over_shards(self, group: Group, place: ShardPlace) -> Tensor:
        """The digest of the whole state, of whose shards each rank has asked `of` last. A collective."""
        parts = group.gather(self._last)
        return torch.stack([parts[rank] for rank in place.ranks[0]]).sum()

    def _of_small(
        self, device: torch.device, width: int, tensors: list[tuple[str, Tensor, Tensor]], place: ShardPlace
    ) -> Tensor:
        key = (width, *((name, whole.dtype, tuple(whole.shape)) for name, whole, _ in tensors))
        if key not in self._known:
            if len(self._known) > 16:  # of states that come and go
                self._known.clear()
            rows = []
            for name, whole, bits in tensors:
                piece = _piece(name, whole, place)
                rows.append(self._table(device)[piece.offset :][: bits.numel()] * _signed(piece.factor))
            self._known[key] = device, torch.cat(rows)
        return (torch.cat([bits for *_, bits in tensors]).long() * self._known[key][1]).sum()

    def _of_large(self, tensor: tuple[str, Tensor, Tensor], place: ShardPlace) -> Tensor:
        name, whole, bits = tensor
        piece, table = _piece(name, whole, place), self._table(bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        done = 0
        while done < bits.numel():
            block, start = divmod(piece.offset + done, BLOCK)
            if start or bits.numel() - done < BLOCK:
                row = bits[done : done + BLOCK - start]
                total += (row.long() * table[start : start + row.numel()]).sum() * _factor(piece.factor, block)
                done += row.numel()
                continue
            count = min((bits.numel() - done) // BLOCK, CHUNK)
            rows = bits[done : done + count * BLOCK].view(count, BLOCK)
            sums = (rows.long() * table).sum(1)
            for number in range(count):
                total += sums[number] * _factor(piece.factor, block + number)
            done += count * BLOCK
        return total

    def _table(self, device: torch.device) -> Tensor:
        """The weights within a block: odd, and without a pattern."""
        if device not in self._tables:
            self._tables[device] = torch.from_numpy(_mixed(numpy.arange(BLOCK, dtype=numpy.uint64))).to(device)
        return self._tables[device]


def as_scalars(digest: Tensor) -> dict[str, Tensor]:
    """A digest among what a step measures."""
    return {HIGH: (digest >> 32).double(), LOW: (digest & 0xFFFFFFFF).double()}


def take(measured: Mapping[str, float]) -> tuple[str | None, dict[str, float]]:
    """The digest among what a step has measured, as 16 hexadecimal digits, and the rest."""
    rest = {name: value for name, value in measured.items() if name not in (HIGH, LOW)}
    if HIGH not in measured:
        return None, rest
    return f"{(int(measured[HIGH]) << 32 | int(measured[LOW])) & (1 << 64) - 1:016x}", rest


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, in C order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().reshape(-1).view(INTEGERS[tensor.itemsize])


def _width(tensor: Tensor) -> int:
    return tensor.itemsize // 2 if tensor.is_complex() else tensor.itemsize


def _count(tensor: Tensor) -> int:
    """The integers that `_bits` makes of a tensor."""
    return tensor.nbytes // _width(tensor)


def _piece(name: str, whole: Tensor, place: ShardPlace) -> _Piece:
    seed = hashlib.blake2b(f"{name} {whole.dtype} {tuple(whole.shape)}".encode(), digest_size=8).digest()
    offset = 0
    if is_distributed(whole) and (shards := shard_count(whole)):
        offset = range_of(whole, place.shard % shards, shards)[0] // _width(whole)
    return _Piece(offset, int.from_bytes(seed, "little") | 1)


def _factor(of_tensor: int, block: int) -> int:
    """The factor of a block of a tensor."""
    own = int(_mixed(numpy.array([BLOCK + block], dtype=numpy.uint64))[0]) if block else 1
    return _signed(of_tensor * own)


def _signed(value: int) -> int:
    """The same bits as a signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mixed(numbers: Any) -> Indices:
    """Odd integers that follow from these: the mixing function of SplitMix64, see `laststep.data.order.nth_seed`."""
    z = (numbers + numpy.uint64(1)) * numpy.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    mixed: Indices = (z ^ z >> numpy.uint64(31) | numpy.uint64(1)).view(numpy.int64)
    return mixed

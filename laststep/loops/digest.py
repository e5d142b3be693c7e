"""Digests of values and of states: whether two are the same, without sending or keeping either.

First of plain values and nested ones, on the host. Then `StateDigest`, which metrics.jsonl has: 64 bits for weights,
buffers and the optimiser's tensors, the same for any sharding. Each element's bits, as an integer, are multiplied by a
weight that follows from the tensor's name and the element's place in the whole tensor, and all products are added
modulo 2^64. So two elements that change places are seen, and two equal changes; no order of the sum matters; and the
digests of the shards of a state add up to that of the whole. It is computed on the device, with the step, and nobody
waits for it: it is read with what the step has measured.

Besides: `FingerprintedState`, whether a state has changed since; `difference_between_ranks`, whether all ranks have the
same; and `BaseWeights`, whether the frozen weights under adapters, which a checkpoint leaves out, are still the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from laststep import compat
from laststep.checkpoint.pack import is_fixed, map_tensors
from laststep.checkpoint.shards import is_distributed, local_of, range_of, shard_count
from laststep.config.errors import ConfigError
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace

CPU = torch.device("cpu")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
MOST_NAMES = 3  # in a message

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digest(value: Any) -> str:
    """16 hexadecimal digits for a value. Of objects other than tensors, arrays, containers and plain values only the
    type counts."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, leaf in leaves_of(value):
        hashed.update(f"{name}\n{type(leaf).__name__}\n".encode())
        if isinstance(leaf, Tensor):
            hashed.update(f"{leaf.dtype} {tuple(leaf.shape)}\n".encode())
            hashed.update(_bytes_of(leaf))
        elif isinstance(leaf, numpy.ndarray):
            hashed.update(f"{leaf.dtype} {leaf.shape}\n".encode())
            hashed.update(b"" if leaf.dtype.hasobject else leaf.tobytes())
        elif isinstance(leaf, PLAIN):
            hashed.update(repr(leaf).encode())
    return hashed.hexdigest()


def digests(state: Any) -> dict[str, str]:
    """The digest of each tensor and each plain value in a nested state, by its path."""
    return {name: digest(leaf) for name, leaf in leaves_of(state)}


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values within nested containers, each with its path, such as model.0.weight."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from leaves_of(item, f"{name}.{key}" if name else str(key))


def _bytes_of(tensor: Tensor) -> Any:
    tensor = local_of(tensor)
    if tensor.device.type == "meta":
        return b""
    if tensor.layout is not torch.strided:
        return repr(tensor.cpu()).encode()  # without the number of its device
    values = tensor.cpu().contiguous().reshape(-1)
    return values.resolve_conj().resolve_neg().view(torch.uint8).numpy().data


HIGH, LOW = "digest high", "digest low"  # among what a step measures: a float64 holds 32 bits of it exactly
BLOCK = 1 << 16  # elements, as many as there are weights
CHUNK = 1 << 6  # blocks of a larger tensor that are multiplied at a time: 32 MB of products


class _Piece(NamedTuple):
    """What this rank adds of one tensor."""

    offset: int  # of its first element in the whole tensor
    factor: int  # of the tensor: odd, as a signed integer


class StateDigest:
    """Computes the digest of one loop's state, on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = torch.zeros((), dtype=torch.int64, device=device)
        self._tables: dict[torch.device, Tensor] = {}

    def of(self, state: Any, place: ShardPlace) -> Tensor | None:
        """The digest of what this rank holds of a state: an int64 scalar on the device. None if it has no tensor."""
        parts: dict[torch.device, Tensor] = {}  # such as Adam's counts of steps, on the CPU
        with torch.no_grad():
            for name, leaf in leaves_of(state):
                if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.device.type == "meta":
                    continue
                bits = _bits(local_of(leaf))
                if bits.numel() and (place.shard == 0 or shard_count(leaf)):
                    own = self._of_tensor(name, leaf, bits, place)
                    parts[own.device] = parts[own.device] + own if own.device in parts else own
            here = [
                part if device == self._device else torch.full_like(self._last, int(part))
                for device, part in parts.items()
            ]
        total = torch.stack(here).sum() if here else None
        self._last = torch.zeros_like(self._last) if total is None else total
        return total

    def over_shards(self, group: Group, place: ShardPlace) -> Tensor:
        """The digest of the whole state, of whose shards each rank has asked `of` last. A collective."""
        parts = group.gather(self._last)
        return torch.stack([parts[rank] for rank in place.ranks[0]]).sum()

    def _of_tensor(self, name: str, whole: Tensor, bits: Tensor, place: ShardPlace) -> Tensor:
        piece, table = _piece(name, whole, place), self._table(bits.device)
        sums: list[Tensor] = []
        done, count = 0, bits.numel()
        while done < count:
            block, start = divmod(piece.offset + done, BLOCK)
            if start or count - done < BLOCK:
                row = bits if count <= BLOCK - start else bits[done : done + BLOCK - start]
                weight = int(_of_blocks(block, 1, CPU)) if block else 1
                sums.append((row.long() * table[start : start + len(row)]).sum() * weight)
                done += len(row)
                continue
            blocks = min((count - done) // BLOCK, CHUNK)
            rows = bits[done : done + blocks * BLOCK].view(blocks, BLOCK)
            sums.append(((rows.long() * table).sum(1) * _of_blocks(block, blocks, bits.device)).sum())
            done += blocks * BLOCK
        return (sums[0] if len(sums) == 1 else torch.stack(sums).sum()) * piece.factor

    def _table(self, device: torch.device) -> Tensor:
        """The weights within a block. Computed there, since copying them would wait for the device."""
        if device not in self._tables:
            self._tables[device] = _mixed(torch.arange(BLOCK, device=device))
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


def _piece(name: str, whole: Tensor, place: ShardPlace) -> _Piece:
    seed = hashlib.blake2b(f"{name} {whole.dtype} {tuple(whole.shape)}".encode(), digest_size=8).digest()
    offset = 0
    if is_distributed(whole) and (shards := shard_count(whole)):
        offset = range_of(whole, place.shard % shards, shards)[0] // _width(whole)
    return _Piece(offset, _signed(int.from_bytes(seed, "little") | 1))


def _of_blocks(first: int, count: int, device: torch.device) -> Tensor:
    """The weights of some blocks of a tensor; that of its first block is 1."""
    weights = _mixed(torch.arange(BLOCK + first, BLOCK + first + count, device=device))
    if not first:
        weights[:1].fill_(1)  # an assignment would copy the number to the device, and wait
    return weights


def _signed(value: int) -> int:
    """The same bits as a signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mixed(numbers: Tensor) -> Tensor:
    """Odd integers that follow from these, without a pattern: the mixing function of SplitMix64, see
    `laststep.data.order.nth_seed`. int64, whose products are those of unsigned integers, bit for bit."""
    z = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31) | 1


def _shifted(values: Tensor, by: int) -> Tensor:
    """To the right, as unsigned integers are: zeros come in."""
    return (values >> by) & ((1 << 64 - by) - 1)


class FingerprintedState:
    """A state held by references to its tensors, with a fingerprint that shows whether they have changed since: on this
    rank."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._tensors: list[Tensor] = []
        self.state = map_tensors(state, self._reference)
        self._versions = self._fingerprint()

    def unchanged(self) -> bool:
        """Whether every tensor still has the values that it had."""
        then, now = self._versions, self._fingerprint()
        return then[0] == now[0] and all(bool((a == b).all()) for a, b in zip(then[1], now[1]))

    def _reference(self, tensor: Tensor) -> Tensor:
        reference = tensor if is_fixed(tensor) else tensor.detach()
        self._tensors.append(local_of(reference) if is_distributed(reference) else reference)
        return reference

    def _fingerprint(self) -> tuple[list[int], list[Tensor]]:
        """Torch's version counters, and hashes of the values: writes through `.data` count no version."""
        return [compat.version_of(t) for t in self._tensors], _hashes(filter(_can_hash, self._tensors))


def difference_between_ranks(state: dict[str, Any], group: Group, shards: int = 1) -> str | None:
    """Which values of this state differ between ranks; None if they are the same. Each rank holds one of its `shards`.
    A collective, of 8 bytes per rank; of 16 if there are shards."""
    leaves, sharded = list(leaves_of(state)), list[tuple[str, Any]]()
    if shards > 1:
        sharded = [(name, leaf) for name, leaf in leaves if is_distributed(leaf)]
        leaves = [(name, leaf) for name, leaf in leaves if not is_distributed(leaf)]
    parts = [(1, leaves)] if shards == 1 else [(1, leaves), (shards, sharded)]
    sums = torch.stack(group.gather(torch.cat([_checksum(part, group.device) for _, part in parts])))
    for of_part, (count, _) in zip(sums.unbind(1), parts):
        if not bool((of_part.view(-1, count) == of_part[:count]).all()):
            return _describe_difference(dict(leaves), dict(sharded), group, shards)
    return None


def _describe_difference(leaves: dict[str, Any], sharded: dict[str, Any], group: Group, shards: int) -> str:
    """Which values of the state differ between ranks. Runs over the store; every rank calls it, once per attempt."""
    rank, size = group.world.rank, group.world.size
    own = {name: digest(leaf) for name, leaf in (leaves | sharded).items()}
    group.store.set(f"state/{rank}", json.dumps(own))
    found = [json.loads(text) for text in group.store.multi_get([f"state/{each}" for each in range(size)])]
    names, ranks = list[str](), list[str]()
    for number, other in enumerate(found):
        first = found[0] | {name: found[number % shards].get(name) for name in sharded}
        differing = [name for name in first | other if first.get(name) != other.get(name)]
        names += [name for name in differing if name not in names]
        ranks += [str(number)] if differing or list(other) != list(first) else []
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    what = ", ".join(names[:MOST_NAMES]) + more if names else "the order of its names"
    against = "rank 0" if shards == 1 else "the first replica of the shard"
    return f"{what} (rank {', '.join(ranks)} against {against})"


def _checksum(leaves: list[tuple[str, Any]], device: torch.device) -> Tensor:
    """A number for these values, on this rank's device: nothing waits for it here."""
    plain, tensors = hashlib.blake2b(digest_size=7), list[Tensor]()
    for name, leaf in leaves:
        if isinstance(leaf, Tensor) and _can_hash(own := local_of(leaf)):
            plain.update(f"{name} {own.dtype} {tuple(own.shape)}\n".encode())
            tensors.append(own)
        else:
            plain.update(f"{name} {digest(leaf)}\n".encode())
    total = torch.tensor([int.from_bytes(plain.digest(), "little")], device=device)
    for hashes in _hashes(tensors):
        weights = torch.arange(1, 2 * len(hashes), 2, device=hashes.device)  # else two tensors could change places
        total += (hashes * weights).sum().to(device)
    return total


def _hashes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """A hash of each of these tensors, those of one device in one tensor on it: Adam's `step` may be on the CPU."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(_hash(tensor))
    return [torch.stack(same) for same in by_device.values()]


def _can_hash(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _hash(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits, as a scalar on its device. Integers, so that no order of the elements matters. Torch's
    hash alone, an exclusive or, is 0 for any two equal elements."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = tensor.detach().view(INTEGERS[tensor.itemsize])
    return bits.sum(dtype=torch.int64) + 0x9E3779B97F4A7C1 * torch.hash_tensor(bits).view(torch.int64)


AT_A_TIME = 1 << 22  # elements, each of which needs 16 bytes more


class BaseWeights:
    """Stands in a checkpoint for the frozen weights of a model that has adapters."""

    def __init__(self, model: nn.Module, adapters: Set[str], exported: Mapping[str, str], group: Group) -> None:
        """`adapters` are their names, each a part of the names of its parameters, as PEFT has them. `exported` has by
        the names in the model those of a file of adapters. A collective."""
        self.model, self._group = model, group
        self._exported = json.dumps(dict(exported))
        self._frozen = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
            and adapters.isdisjoint(name.split("."))
            and type(local_of(parameter).data) is Tensor  # what it would do to others, nobody knows
        }
        # A quantised weight has more entries in the state_dict, by names that continue its own.
        self.left_out = frozenset(
            name for name in model.state_dict(keep_vars=True) if not self._frozen.keys().isdisjoint(_prefixes(name))
        )
        self.take()

    def take(self) -> None:
        """Take the fingerprints of the weights as they are now. A collective."""
        sums = [_sum_of(parameter, self._group).to(self._group.device) for parameter in self._frozen.values()]
        ranks = torch.stack(self._group.gather(torch.stack(sums))) if sums else torch.zeros(1, 0)
        self._found: dict[str, str] = {}
        for number, (name, parameter) in enumerate(self._frozen.items()):
            total = int(ranks[: max(1, shard_count(parameter)), number].sum())
            self._found[name] = f"{parameter.dtype} {tuple(parameter.shape)} {total & (1 << 64) - 1:016x}"
        self._text = json.dumps(self._found)

    def state_dict(self) -> dict[str, str]:
        """As text: it is copied in each step, and there may be thousands."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when the training began, and is not any more: a checkpoint of a model with "
                    "adapters holds the adapters alone; unfreeze before trainer.train()"
                )
        return {"fingerprints": self._text, "exported": self._exported}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Raises ConfigError if these are other weights than those with which the run began."""
        before: dict[str, str] = json.loads(state["fingerprints"])
        now = self._found
        if differ := [name for name in before | now if before.get(name) != now.get(name)]:
            more = f" and {len(differ) - MOST_NAMES} more" if len(differ) > MOST_NAMES else ""
            raise ConfigError(
                f"the base model is not the one that this run began with: {', '.join(differ[:MOST_NAMES])}{more} "
                "differ; the checkpoint holds the adapters alone, so load the same base model, or start a new run"
            )


def _prefixes(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[: number + 1]) for number in range(len(parts))}


def _sum_of(parameter: Tensor, group: Group) -> Tensor:
    """The sum of the bits of all elements, each times a number that depends on its place; of a sharded parameter, the
    part of this rank. Integers: no order of adding them matters."""
    bits, first, shards = _bits(local_of(parameter).data), 0, shard_count(parameter)
    if shards:
        first = range_of(parameter, group.world.rank % shards, shards)[0] // parameter.itemsize
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start, part in zip(range(0, len(bits), AT_A_TIME), bits.split(AT_A_TIME)):
        places = torch.arange(first + start, first + start + len(part), device=bits.device)
        total += ((2 * places + 1) * part).sum()
    return total

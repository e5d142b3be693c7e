"""Compares the registered state over the ranks before a save, in which each rank writes its stripe of it.

The shards of a sharded tensor are compared over the ranks that hold the same one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from laststep.checkpoint.shards import is_distributed, local_of
from laststep.loops.digests import PLAIN, leaves_of
from laststep.loops.registered import State
from laststep.ranks.group import Group

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
MOST_NAMES = 3


def difference_between_ranks(state: State, group: Group, shards: int = 1) -> str | None:
    """Which values of this state, of which the rank holds one of so many shards, differ between ranks; None if they are
    the same. A collective, of 8 bytes per rank; of 16 if there are shards."""
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
    own = {name: _digest(leaf) for name, leaf in (leaves | sharded).items()}
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
    plain = hashlib.blake2b(digest_size=7)
    hashes: dict[torch.device, list[Tensor]] = {}  # Adam's `step` may be on the CPU
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            leaf = local_of(leaf)
        if isinstance(leaf, Tensor) and _can_hash(leaf):
            plain.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
            hashes.setdefault(leaf.device, []).append(_hash(leaf))
        else:
            plain.update(f"{name} {_digest(leaf)}\n".encode())
    total = torch.tensor([int.from_bytes(plain.digest(), "little")], device=device)
    for same in hashes.values():
        stacked = torch.stack(same)
        weights = torch.arange(1, 2 * len(same), 2, device=stacked.device)  # else two tensors could change places
        total += (stacked * weights).sum().to(device)
    return total


def _digest(leaf: Any) -> str:
    """A text that differs where values differ. Of objects that are not plain only the type counts."""
    if isinstance(leaf, Tensor):
        leaf = local_of(leaf)
        return f"{leaf.dtype} {tuple(leaf.shape)} {int(_hash(leaf)) if _can_hash(leaf) else ''}"
    if isinstance(leaf, PLAIN):
        return f"{type(leaf).__name__} {leaf!r}"
    return type(leaf).__name__


def _can_hash(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _hash(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits, as a scalar on its device. Integers, so that no order of the elements matters. Torch's
    hash alone, an exclusive or, is 0 for any two equal elements."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = tensor.detach().view(INTEGERS[tensor.itemsize])
    return bits.sum(dtype=torch.int64) + 0x9E3779B97F4A7C1 * torch.hash_tensor(bits).view(torch.int64)

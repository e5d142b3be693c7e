"""Compares the registered state over the ranks before a save, in which each rank writes its stripe of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from trainer.loops.digests import PLAIN, leaves_of
from trainer.loops.registered import State
from trainer.world.group import Group

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
MOST_NAMES = 3


def difference_between_ranks(state: State, group: Group) -> str | None:
    """Which values of this state differ between ranks; None if they are the same. A collective, of 8 bytes per rank."""
    own = _checksum(state, group.device)
    return None if bool((torch.stack(group.gather(own)) == own).all()) else _describe_difference(state, group)


def _describe_difference(state: State, group: Group) -> str:
    """Which values of the state differ between ranks. Runs over the store; every rank calls it, once per attempt."""
    own = {name: _digest(leaf) for name, leaf in leaves_of(state)}
    group.store.set(f"state/{group.world.rank}", json.dumps(own))
    texts = group.store.multi_get([f"state/{rank}" for rank in range(group.world.size)])
    first, *others = (json.loads(text) for text in texts)
    names = [name for name in first if any(other.get(name) != first[name] for other in others)]
    names += [name for other in others for name in other if name not in first and name not in names]
    ranks = [str(rank) for rank, other in enumerate(others, 1) if other != first or list(other) != list(first)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    what = ", ".join(names[:MOST_NAMES]) + more if names else "the order of its names"
    return f"{what} (rank {', '.join(ranks)} against rank 0)"


def _checksum(state: State, device: torch.device) -> Tensor:
    """A number for the state, on this rank's device: nothing waits for it here."""
    plain = hashlib.blake2b(digest_size=7)
    hashes: dict[torch.device, list[Tensor]] = {}  # Adam's `step` may be on the CPU
    for name, leaf in leaves_of(state):
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

"""Digests of nested values: two values have the same digest exactly when they have the same bits.

Of a sharded tensor, these are the bits that this rank holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from laststep.checkpoint.shards import local_of

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
            hashed.update(leaf.tobytes())
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
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return repr(tensor).encode()
    values = local_of(tensor).cpu().contiguous().reshape(-1)
    return values.resolve_conj().resolve_neg().view(torch.uint8).numpy().data

"""A fingerprint of a model's weights, the same however many ranks hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def weights_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's weights in a checkpoint's state. A custom training loop may have registered nothing as "model": then
    the tensors of everything that it has registered."""
    if "model" in state:
        return dict(state["model"])
    parts = {name: part for name, part in state.items() if isinstance(part, dict)}
    return {f"{name}.{key}": t for name, part in parts.items() for key, t in part.items() if isinstance(t, Tensor)}


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the name, dtype, shape and bytes of each tensor, in name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""The weights in a checkpoint by the names of the plain model, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

READY_MADE = {"model", "average", "optimizer", "scaler"}  # what the ready-made loop saves, see Learner.state_dict
AVERAGE_COUNT = "n_averaged"  # the one tensor in an AveragedModel's state_dict that belongs to no model


def weights_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's weights in a checkpoint's state. A custom training loop may have registered nothing as "model": then
    the tensors of everything that it has registered."""
    if "model" in state:
        return dict(state["model"])
    parts = {name: part for name, part in state.items() if isinstance(part, dict)}
    return {f"{name}.{key}": t for name, part in parts.items() for key, t in part.items() if isinstance(t, Tensor)}


def plain_weights(state: Mapping[str, Any], raw: bool = False) -> dict[str, Tensor]:
    """The weights of a run's model, by the names of the plain model, without those that wrappers add.

    The ready-made loop averages the weights where train.ema_decay is set: then the average, or with `raw` the weights
    themselves. Of a custom training loop: the module that it has registered, or, of several, all of them, each name
    after the module's. Empty when it has registered none.
    """
    if state.keys() >= READY_MADE:
        return _plain(state["average"] if is_averaged(state) and not raw else state["model"])
    modules = {name: _plain(part) for name, part in state.items() if _is_of_a_module(part)}
    if len(modules) == 1:
        return modules.popitem()[1]
    return {f"{name}.{key}": tensor for name, weights in modules.items() for key, tensor in weights.items()}


def is_averaged(state: Mapping[str, Any]) -> bool:
    """Whether the ready-made loop has saved an average of the weights too."""
    return state.keys() >= READY_MADE and state["average"] is not None


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile adds, to the model or to parts of it."""
    return name.replace("_orig_mod.", "")


def _plain(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a module's state_dict; of an AveragedModel's, those of the average."""
    if AVERAGE_COUNT in state:
        state = {name.removeprefix("module."): value for name, value in state.items() if name != AVERAGE_COUNT}
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _is_of_a_module(part: Any) -> bool:
    """Whether this looks like a module's state_dict: named tensors and nothing else. Those of optimisers and schedulers
    hold lists and numbers."""
    if not isinstance(part, dict):
        return False
    values = [value for name, value in part.items() if not str(name).endswith("_extra_state")]
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the name, dtype, shape and bytes of each tensor, in name order: the same for any number of ranks."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()

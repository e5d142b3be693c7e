"""The repeated blocks of a model, and their recomputation in the backward pass."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from torch import nn

from laststep import compat

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # what else torch.nn has is too small, or a container


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of which a model has several of a kind, such as residual blocks and encoder layers."""
    kinds = Counter(
        type(m) for m in model.modules() if type(m) in LAYERS or not type(m).__module__.startswith("torch.nn.")
    )
    blocks = [m for m in model.modules() if kinds[type(m)] > 1]
    inner = {id(m) for block in blocks for m in block.modules() if m is not block}
    return [block for block in blocks if id(block) not in inner]


def checkpoint_activations(model: nn.Module, compiled: bool) -> None:
    """Recompute the repeated blocks in the backward pass; a model without repeated blocks recomputes its children."""
    chosen = {id(m) for m in repeated_blocks(model) or model.children()}
    # torch.compile does its own recomputation, which does not repeat such side effects.
    contexts = None if compiled else lambda: _statistics_once(model)
    compat.checkpoint_activations(model, lambda m: id(m) in chosen, contexts)


def _statistics_once(model: nn.Module) -> tuple[contextlib.AbstractContextManager[None], ...]:
    """Contexts for the forward pass and for its recomputation, in which batch norm must not count the batch again."""

    @contextlib.contextmanager
    def recomputation() -> Iterator[None]:
        norms = [m for m in model.modules() if compat.is_batch_norm(m)]
        before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, batches) in zip(norms, before):
                norm.momentum, norm.num_batches_tracked = momentum, batches

    return contextlib.nullcontext(), recomputation()

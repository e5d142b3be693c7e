"""The model's buffers, alike on every rank after every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer import compat
from trainer.world.group import Group


class Buffers:
    """Batch norm's statistics and the like: a forward pass changes them in place, on each rank after its own samples.

    DDP would give every rank those of rank 0 before the next forward pass, so what the last step made of them would
    go with rank 0 when it dies. Here they are handed out at the end of the step (at the same cost, and instead), and a
    copy is kept, since the next forward pass changes them again: so at any moment any rank alone holds the whole state
    of the last whole step.
    """

    def __init__(self, model: nn.Module, group: Group, *more: Tensor) -> None:
        """Those of `model`, and `more` tensors that shall be rank 0's too."""
        dense = [buffer for buffer in (*model.buffers(), *more) if _is_dense(buffer)]
        # Large elements first, so that each lies at a multiple of its size in a row of bytes.
        self._live = sorted(dense, key=lambda b: -b.element_size())
        self._bytes = [buffer.detach().as_strided((buffer.numel(),), (1,)).view(torch.uint8) for buffer in self._live]
        self._sizes = [len(part) for part in self._bytes]
        self._group = group
        self._kept = self._gather()
        self._next = self._kept

    def restart(self) -> None:
        """Keep the buffers as they are: a state was put in, or is whole now."""
        self._kept = self._gather()

    def share(self) -> None:
        """Give every rank rank 0's. A collective."""
        if self._live:
            self._next = self._gather()
            self._group.broadcast([self._next])

    def keep(self, bad: Tensor | None = None) -> None:
        """The step is done: keep what `share` brought, or, where it was `bad` (a scalar, not 0), what was before.
        Before any `share`, the buffers are put back as they were."""
        if self._live:
            self._kept = self._next if bad is None else torch.where(bad == 0, self._next, self._kept)
            compat.copy_each(self._bytes, self._kept.split(self._sizes))

    def kept_in(self, state: dict[str, Any]) -> dict[str, Any]:
        """A model's `state_dict(keep_vars=True)` with the kept buffers in place of the live ones, detached."""
        parts = zip(self._live, self._kept.split(self._sizes))
        kept = {id(live): part.view(live.dtype).as_strided(live.size(), live.stride()) for live, part in parts}
        return {name: kept.get(id(value), value).detach() for name, value in state.items()}

    def _gather(self) -> Tensor:
        return torch.cat(self._bytes) if self._bytes else torch.empty(0, dtype=torch.uint8)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory without gaps and overlaps. Any other is a constant: who would write to it?"""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()

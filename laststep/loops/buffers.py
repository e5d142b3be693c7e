"""The model's buffers, the same on every rank after every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laststep import compat
from laststep.loops.homes import Homes
from laststep.ranks.group import Group


@dataclass(frozen=True)
class Committed:
    """The buffers of one finished step. Each commit makes a new one, and changes no earlier one."""

    row: Tensor  # the bytes of those on the device
    elsewhere: list[Tensor]


class Buffers:
    """Batch norm's statistics and the like. A forward pass changes them in place, on each rank from its own samples.

    By default DDP broadcasts rank 0's buffers before the next forward pass. Then the last step's buffers would be lost
    with rank 0 if it died. Here they are broadcast at the end of the step instead, at the same cost, and a copy is
    committed, because the next forward pass changes the live ones. So at any moment each rank alone holds the complete
    state of the last finished step.

    The order of calls: a forward pass, `broadcast`, `commit`. With `train.shares` a step may have several forward
    passes that each begin with the same buffers; the first one's are broadcast. Between two of them: `rewind`.
    """

    def __init__(self, model: nn.Module, group: Group, *more: Tensor) -> None:
        """The buffers of `model`, and `more` tensors to treat like buffers."""
        dense = [buffer for buffer in (*model.buffers(), *more) if is_dense(buffer)]
        self._homes = Homes(model, dense)
        # Such as the counter of torch's AveragedModel, on the CPU. NCCL could not send it; it is the same on all ranks.
        self._elsewhere = [buffer for buffer in dense if buffer.device.type != group.device.type]
        dense = [buffer for buffer in dense if buffer.device.type == group.device.type]
        # Large elements first, so that each lies at a multiple of its size in a row of bytes.
        self._live = sorted(dense, key=lambda b: -b.element_size())
        kept = {id(tensor) for tensor in more}
        self._more = [number for number, buffer in enumerate(self._live) if id(buffer) in kept]
        self._bytes = [bytes_of(buffer) for buffer in self._live]
        self._sizes = [len(part) for part in self._bytes]
        self._layouts = [(buffer.dtype, buffer.size(), buffer.stride()) for buffer in self._live]
        self._group = group
        self.received = self._gather()  # by the last `broadcast`; the next one makes a new tensor
        self._captured = False  # since the last `broadcast`
        self.snapshot()

    def snapshot(self) -> None:
        """Commit the live buffers as they are. No collective."""
        self.committed = self.copy()

    def copy(self) -> Committed:
        """A copy of the live buffers, which is not committed."""
        self._homes.bring_back()
        return Committed(self._gather(), [buffer.clone() for buffer in self._elsewhere])

    def broadcast(self) -> None:
        """Receive rank 0's buffers, to be committed by `commit`. A collective."""
        if self._live:
            if self._captured and self._more:
                received = self.received.split(self._sizes)
                compat.copy_each([received[n] for n in self._more], [self._bytes[n] for n in self._more])
            self.capture()
            self._captured = False
            self._group.broadcast([self.received])

    def capture(self) -> None:
        """What is in the live buffers now will be broadcast, unless that has been said since the last `broadcast`. This
        does not hold for the tensors that are only treated like buffers."""
        if self._live and not self._captured:
            self._homes.bring_back()
            self.received, self._captured = self._gather(), True

    def rewind(self, start: Committed | None = None) -> None:
        """Put the buffers `start` back into the live ones, None: the committed ones; what was there at the first call
        will be broadcast."""
        self.capture()
        self._homes.bring_back()
        start = start or self.committed
        if self._live:
            parts = list(start.row.split(self._sizes))
            for number in self._more:
                parts[number] = self._bytes[number]
            compat.copy_each(self._bytes, parts)
        for live, copied in zip(self._elsewhere, start.elsewhere):
            live.copy_(copied)

    def commit(self, nonfinite: Tensor | None = None) -> None:
        """Commit the buffers that `broadcast` received, and copy them into the live ones.

        Where `nonfinite` (a scalar on the device) is not 0, the last committed ones stay instead. Before any
        `broadcast` this restores the live buffers to how they were at the start.
        """
        self._homes.bring_back()
        if self._live:
            row = self.received
            if nonfinite is not None:
                row = torch.where(nonfinite == 0, row, self.committed.row)
            self.committed = Committed(row, [buffer.clone() for buffer in self._elsewhere])
            compat.copy_each(self._bytes, row.split(self._sizes))

    def in_state_dict(self, state: dict[str, Any], committed: Committed, prefix: str = "") -> dict[str, Any]:
        """A model's `state_dict(keep_vars=True)` with these committed buffers in place of the live ones, detached. That
        model is at `prefix` in the one that was given at first. By name, since a step that is under way may have put
        another tensor in a buffer's place."""
        parts = [
            part.view(dtype).as_strided(size, stride)
            for part, (dtype, size, stride) in zip(committed.row.split(self._sizes), self._layouts)
        ]
        live = (*self._live, *self._elsewhere)
        values = {id(buffer): value for buffer, value in zip(live, (*parts, *committed.elsewhere))}
        named = {path: values[id(home)] for path, home in self._homes.paths}
        return {name: named.get(prefix + name, values.get(id(value), value)).detach() for name, value in state.items()}

    def _gather(self) -> Tensor:
        return torch.cat(self._bytes) if self._bytes else torch.empty(0, dtype=torch.uint8)


def bytes_of(dense: Tensor) -> Tensor:
    """A view of the bytes of a tensor that has no gaps and overlaps, in memory order."""
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements are in memory without gaps and overlaps. If not, it is an expanded constant, to
    which nothing writes."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()

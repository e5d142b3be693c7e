"""Keeps a model's buffers where they are in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer import compat
from trainer.config.errors import ConfigError


class _Place(NamedTuple):
    """One buffer of one module."""

    buffers: dict[str, Tensor | None]  # the module's, by name
    name: str
    path: str  # the name in the whole model
    home: Tensor  # the buffer
    memory: Tensor  # the same memory, whatever becomes of the buffer
    address: int

    @property
    def now(self) -> Tensor | None:
        """What the module has there."""
        return self.buffers.get(self.name)


class Homes:
    """The buffers of a model, of which others know the memory: where it is, and how large.

    A forward pass may put another tensor in the place of a buffer, as `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`
    does.
    """

    def __init__(self, model: nn.Module, buffers: Collection[Tensor]) -> None:
        """`buffers` are those to look after."""
        known = {id(buffer) for buffer in buffers}
        self._places = [
            _Place(named, name, f"{path}.{name}".lstrip("."), buffer, buffer.detach(), buffer.data_ptr())
            for path, named in ((path, compat.buffers_of(module)) for path, module in model.named_modules())
            for name, buffer in named.items()
            if buffer is not None and id(buffer) in known
        ]

    def bring_back(self) -> None:
        """Copy what has taken a buffer's place to where the buffer was, and put the buffer back. Raises ConfigError if
        it is of another size, type or device."""
        for place in self._places:
            now, memory = place.now, place.memory
            if now is not place.home or now.data_ptr() != place.address or now.shape != memory.shape:
                self._bring_back(place, now)

    def replaced(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The buffers in whose place there is something else, and that."""
        for place in self._places:
            if (now := place.now) is not None and now is not place.home:
                yield place.home, now

    @torch.no_grad()
    def _bring_back(self, place: _Place, now: Tensor | None) -> None:
        memory = place.memory
        if now is None or _kind(now) != _kind(memory):
            became = "None" if now is None else _kind(now)
            raise ConfigError(
                f"the model's buffer {place.path} was {_kind(memory)}, and a step has made it {became}, which no "
                "checkpoint can follow; give it its final size and type before training"
            )
        memory.copy_(now)
        place.buffers[place.name] = place.home
        if place.home.data_ptr() != place.address:
            place.home.data = memory


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device.type}"

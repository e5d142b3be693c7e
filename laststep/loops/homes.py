"""Keeps a model's buffers where they are in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laststep import compat
from laststep.config.errors import ConfigError


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
        return self.buffers[self.name] if self.name in self.buffers else None  # noqa: SIM401 (TorchScript has no get)


class Homes:
    """The buffers of a model that a checkpoint holds, of which others know the memory: where it is, and how large.

    A forward pass may put another tensor in the place of a buffer, as `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`
    does.
    """

    def __init__(self, model: nn.Module, buffers: Collection[Tensor]) -> None:
        """`buffers` are those to look after."""
        known = {id(buffer) for buffer in buffers}
        self._places: list[_Place] = []
        for path, module in model.named_modules():
            named = compat.buffers_of(module)
            for name in compat.saved_buffers(module):
                buffer = named[name]
                if buffer is not None and id(buffer) in known:
                    whole = f"{path}.{name}" if path else name
                    self._places.append(_Place(named, name, whole, buffer, buffer.detach(), buffer.data_ptr()))
        counts = Counter(id(place.home) for place in self._places)
        self._shared = {home for home, count in counts.items() if count > 1}

    def bring_back(self) -> None:
        """Copy what has taken a buffer's place to where the buffer was, and put the buffer back. Raises ConfigError if
        it is of another size."""
        replaced = [
            (place, now)
            for place in self._places
            if (now := place.now) is not place.home
            or now.data_ptr() != place.address
            or now.shape != place.memory.shape
        ]
        if replaced:
            self._bring_back([(place, now) for place, now in replaced if not _is_moved(place, now)])

    @property
    def paths(self) -> list[tuple[str, Tensor]]:
        """The name in the whole model of each buffer, and that buffer."""
        return [(place.path, place.home) for place in self._places]

    @torch.no_grad()
    def _bring_back(self, replaced: list[tuple[_Place, Tensor | None]]) -> None:
        values = []
        for place, now in replaced:
            if now is None or now.shape != place.memory.shape:
                became = "None" if now is None else f"of shape {tuple(now.shape)}"
                raise ConfigError(
                    f"the model's buffer {place.path} was of shape {tuple(place.memory.shape)}, and a step has made it "
                    f"{became}, which no checkpoint can follow; give it its final shape before training"
                )
            if id(place.home) in self._shared:
                raise ConfigError(
                    f"the model's buffer {place.path} is one tensor with another buffer, and a step has replaced it; "
                    "change it in place (copy_), or give each its own"
                )
            values.append(now.clone())  # one buffer may have taken the tensor of another
        for (place, _), value in zip(replaced, values):
            place.memory.copy_(value)
            place.buffers[place.name] = place.home
            if place.home.data_ptr() != place.address:
                place.home.data = place.memory


def _is_moved(place: _Place, now: Tensor | None) -> bool:
    """Whether the whole model is elsewhere, as Lightning moves it to the CPU at its end: no step did that."""
    return now is not None and now.device != place.memory.device

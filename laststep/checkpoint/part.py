"""The part of a state that this rank writes when all ranks save together, copied while training waits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from laststep.checkpoint.buffers import reusable_buffer
from laststep.checkpoint.manifest import shard_name
from laststep.checkpoint.pack import Packed
from laststep.checkpoint.stripes import own_stripe, stripe_count
from laststep.ranks.world import ShardPlace


class Part(NamedTuple):
    """A stripe of a shard of the state."""

    structure: Any  # of the whole state, see `laststep.checkpoint.pack`
    sharding: list[int]  # see `Manifest`
    file: str | None  # for the stripe, if this rank writes one
    data: memoryview  # its bytes


class PartCopier:
    """Copies this rank's part into a buffer that is used again by every save."""

    def __init__(self, place: ShardPlace, device: torch.device) -> None:
        self.place, self._device = place, device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def buffer_bytes(self) -> int:
        """The size of the buffer so far."""
        return self._buffer.numel()

    def part_bytes(self, state: Any) -> int:
        """The size of this rank's part of `state`."""
        packed, place = Packed(state, self.place), self.place
        stripe = own_stripe(packed.most_bytes, place.replica, place.replicas)
        start, stop = (0, 0) if stripe is None else stripe.bounds(packed.bytes)
        return stop - start

    def reserve(self, count: int) -> None:
        """Have a buffer for a part of this size. One of 12 GB, which is pinned for a GPU, takes seconds."""
        if self._buffer.numel() < count:
            self._buffer = reusable_buffer(count, self._device)

    def copy(self, state: Any) -> Part:
        """This rank's part of `state`, valid until the next call."""
        place = self.place
        packed = Packed(state, place)
        files = stripe_count(packed.most_bytes, place.replicas)  # of each shard
        sharding = [files] * place.shards if place.shards > 1 else []
        stripe = own_stripe(packed.most_bytes, place.replica, place.replicas)
        if stripe is None:
            return Part(packed.structure, sharding, None, memoryview(b""))
        start, stop = stripe.bounds(packed.bytes)
        self.reserve(stop - start)
        data = self._buffer[: stop - start]
        packed.copy(start, stop, data)
        name = shard_name(place.shard * files + stripe.number, place.shards * files)
        return Part(packed.structure, sharding, name, data.numpy().data)

"""Copies of shards in host memory: this rank's own, and those that its ward on another node has sent.

At the end of every N-th step each rank copies its shard, and a thread sends the copy to its keeper while the next steps
are done. Before the step at whose end the next copy is taken, the keeper must have the last one. So at any moment there
is a copied step of which every shard survives the loss of a node: the last, or while that is on its way the one before.
Some ranks may be a step ahead of others, so each has its own last two copies, and those of its ward. With N = 1 no rank
begins a step before its copy of the last one is complete, so that no step is lost.

A keeper that does not answer costs a warning and the copies, never the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from laststep.checkpoint.manager import Position
from laststep.checkpoint.pack import Packed
from laststep.checkpoint.writer import CheckpointInfo, HostMemory, reusable_buffer
from laststep.config.errors import ConfigError
from laststep.loops.readback import Measured
from laststep.ranks.group import Group
from laststep.ranks.replicas import Copy, Place, ReplicaLink, keeper_of
from laststep.ranks.world import ShardPlace
from laststep.say import say

ARRIVES_S = 1.0  # how long a rescue waits for a copy that is on its way from a ward that lives


@dataclass
class OwnCopy:
    """This rank's shard, as it was after a step."""

    position: Position  # complete once the lines of its steps are `counted`
    info: CheckpointInfo
    measured: Sequence[Measured]  # by the steps whose lines were not written then
    counted: bool
    buffer: Tensor
    packed: Any  # the structure of the state

    @property
    def structure(self) -> Any:
        """The structure of the state, with its position."""
        position = {"position": asdict(self.position)}
        if set(self.packed) == {"state", "sharded"}:
            return {**self.packed, "state": {**self.packed["state"], **position}}
        return {**self.packed, **position}

    @property
    def data(self) -> memoryview:
        """The bytes of the shard."""
        return self.buffer.numpy().data


class Copies:
    """The copies that this rank holds, and the thread that sends them. `patience_s`: how long training waits for a
    keeper."""

    def __init__(
        self, link: ReplicaLink, place: ShardPlace, device: torch.device, every_steps: int, patience_s: float
    ) -> None:
        self.copied_s = self.waited_s = 0.0  # how long training has stood still
        self._link, self._place, self._device = link, place, device
        self._every_steps, self._patience_s = every_steps, patience_s
        self._lock = threading.Lock()  # guards the fields below
        self._own: list[OwnCopy] = []  # complete ones, at most two, the older first
        self._frozen = False
        self._warned = False

    # In the thread that trains

    def is_due(self, step: int) -> bool:
        """Whether a copy is taken at the end of this step."""
        return step % self._every_steps == 0

    def take(self, position: Position, info: CheckpointInfo, state: Any, measured: Sequence[Measured]) -> None:
        """Copy this rank's shard of the state, and start to send it. Does not return once the copies are frozen.

        `measured` has what the steps measured whose lines are not written yet.
        """
        began = time.perf_counter()
        with self._lock:
            frozen = self._frozen
            spare = None if frozen or len(self._own) < 2 else self._own.pop(0).buffer
        if frozen:
            threading.Event().wait()  # the process ends
        packed = Packed(state, self._place)
        if spare is None or len(spare) != packed.bytes:
            spare = reusable_buffer(packed.bytes, self._device)
        packed.copy(0, packed.bytes, spare)
        copy = OwnCopy(position, info, measured, False, spare, packed.structure)
        with self._lock:
            self._own.append(copy)
        self._link.send(Copy(position.place, copy.data))
        self.copied_s += time.perf_counter() - began

    def complete(self) -> None:
        """Wait until the keeper has the last copy. If it does not answer, training continues without copies there."""
        began = time.perf_counter()
        if not self._link.wait(self._patience_s):
            self._link.give_up(f"it has not answered for {self._patience_s:.0f} s")
        self.waited_s += time.perf_counter() - began
        if self._link.error is not None and not self._warned:
            self._warned = True
            say(
                f"WARNING: rank {self._link.keeper} keeps no copies of this rank any more: {self._link.error}; if this "
                "rank is lost, the run is back at its newest checkpoint"
            )

    # In any thread

    def count(self, step: int, position: Position, records: int) -> None:
        """The lines of all steps up to this one are counted in `position`; there are so many `records`."""
        with self._lock:
            for copy in self._own:
                if copy.position.step == step and not copy.counted:
                    its = copy.position
                    its.loss_sum, its.loss_samples, its.skipped = (
                        position.loss_sum,
                        position.loss_samples,
                        position.skipped,
                    )
                    its.records, copy.counted = records, True

    def freeze(self, write: Callable[[Sequence[Measured]], None]) -> None:
        """Change no copy any more. `write` writes the lines of the steps that the newest copy needs."""
        with self._lock:
            self._frozen = True
            uncounted = [copy.measured for copy in self._own if not copy.counted]
        self._link.freeze(ARRIVES_S)
        if uncounted:
            write(uncounted[-1])

    def own(self) -> list[OwnCopy]:
        """This rank's own copies that can be saved."""
        with self._lock:
            return [copy for copy in self._own if copy.counted]

    def own_at(self, place: Place) -> OwnCopy | None:
        """The own copy at this place."""
        return next((copy for copy in self.own() if copy.position.place == place), None)

    def at(self, place: Place) -> dict[int, memoryview]:
        """The copies at this place by their shard. Call after `freeze`."""
        kept = [(self.ward_shard, copy.data) for copy in self.kept() if copy.place == place]
        own = self.own_at(place)
        return dict(kept if own is None else [*kept, (self._place.shard, own.data)])

    def kept(self) -> list[Copy]:
        """The last two copies of the ward. Call after `freeze`."""
        return self._link.freeze(0.0)

    @property
    def ward_shard(self) -> int:
        """The shard of which copies are kept here."""
        return self._link.ward % self._place.shards

    def close(self) -> None:
        """Send and keep nothing any more."""
        self._link.close()


def open_link(group: Group, place: ShardPlace) -> ReplicaLink:
    """This rank's link to its keeper and its ward. Raises ConfigError where no other node can keep its shard."""
    world = group.world
    if place.shards == 1 or place.replicas > 1:
        raise ConfigError(
            "checkpoint.replicas=1: copies are for a state that is cut over all ranks (train.sharding=full, or in a "
            "custom loop a mesh of all ranks); here other ranks hold the same, so a rank that dies costs no step: use "
            "checkpoint.replicas=0"
        )
    if world.hosts[keeper_of(world.rank, world)] == world.hosts[world.rank] and len(set(world.hosts)) > 1:
        raise ConfigError(
            "checkpoint.replicas=1: each node must have as many ranks as the others; these are on "
            f"{', '.join(world.hosts)}"
        )
    return ReplicaLink(world, group.store, group.seal, lambda count: HostMemory(count).tensor.numpy().data)

"""The part of a loop that survives it: the state that another thread can save while the thread that trains is stuck."""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laststep.checkpoint.files import StateChanged
from laststep.checkpoint.manager import Position
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import WRITE_BYTES, CheckpointInfo, FrozenState
from laststep.loops.copies import Copies
from laststep.loops.held import HeldState, HeldStep
from laststep.loops.readback import Measured, Readback
from laststep.loops.ring import Ring
from laststep.ranks.device import open_queue
from laststep.ranks.replicas import Place
from laststep.ranks.world import Gathered, ShardPlace
from laststep.records.metrics import MetricsFile

if TYPE_CHECKING:
    from laststep.loops.late_update import LateUpdate


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite, and train.nonfinite=fail."""


@dataclass(frozen=True)
class HeldCopy:
    """A shard of the state in host memory."""

    place: Place
    shard: int
    bytes: int
    own: bool  # this rank's own shard, with what else a checkpoint needs to know


class Rescued(ABC):
    """What a loop does for its rescue.

    `ring` knows the newest state that the device has as a whole. Besides, the loop holds `records_lock` while it writes
    lines of metrics.jsonl or ends an epoch, never while it waits for the device or for another rank.
    """

    store: CheckpointStore
    metrics: MetricsFile
    readback: Readback
    size: int
    place: ShardPlace  # which shard of the state this rank holds

    def __init__(self, device: torch.device) -> None:
        self.queue = open_queue(device)
        self.ring = Ring(self.queue, self._hold_step)
        self.records_lock = threading.Lock()
        self._records_locked = False  # by a rescue
        self._position = Position()
        self._frozen: Position | None = None
        self._frozen_live = False  # whether what this rank trains with is whole, and frozen
        self._torn = False  # whether a rescue has begun an update of it that it has not ended
        self.late_update: LateUpdate | None = None  # where a rescue may do one
        self.copies: Copies | None = None  # with checkpoint.replicas
        self._host_buffer = self.queue.host_buffer(WRITE_BYTES)
        self.restored = False  # whether there is a state worth saving
        self.rescuable = True  # whether a rank alone has all of the state

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the position: references, the same on every rank."""

    @abstractmethod
    def _hold(self) -> HeldState:
        """What the host holds of the state that `_state` returns."""

    @abstractmethod
    def _checkpoint_info(self) -> CheckpointInfo:
        """What a manifest says of `position`."""

    @abstractmethod
    def _write_steps(self, measured: list[Measured]) -> None:
        """Write the oldest pending steps to metrics.jsonl. The caller holds `records_lock`. Raises NotFinite."""

    @property
    def position(self) -> Position:
        """How far the run has come: up to what is queued on the device; once it is frozen, that of the frozen state."""
        return self._frozen or self._position

    def freeze(self, timeout_s: float) -> bool:
        """Let the state change no more, and write the steps of the newest whole one to the metrics: from now on
        `position` is its. For threads other than the one that trains. False when no state is whole.

        A GPU may still do what is queued, if the rank that it waits for comes back. Then another state is whole, and
        this is called again. Raises DeviceSilent when the device does not answer.
        """
        self._frozen_live = False
        self._frozen_live = self.restored and not self._torn and self._freeze(timeout_s)
        return self._frozen_live

    def advance(self, gathered: Gathered) -> bool:
        """Do the update that the frozen state lacks to be that of `gathered.step`, at most once; see LateUpdate. Call
        `freeze` again. False if nothing has changed."""
        late = self.late_update
        if late is None or late.tried or not self._frozen_live or self.position.step != gathered.step - 1:
            return False
        held = self.ring.held
        self._frozen_live, self._torn = False, True
        done = late.do(gathered)
        if done is not None:
            if held is not None:
                self._position = held.position
                self.readback.forget(held.position.step)
            self._count_step(*done)
        self._torn = False
        return done is not None

    @property
    def gathered(self) -> Gathered | None:
        """What all ranks have gathered last, as far as this one knows, for those that wait for it. After `freeze`."""
        if self.late_update is None or (self.queue.runs_ahead and not self._frozen_live):
            return None
        return self.late_update.gathered(self.position.step)

    def _freeze(self, timeout_s: float) -> bool:
        if not self.ring.freeze(timeout_s):
            return False
        if not self._lock_records(timeout_s):
            return False
        while True:
            self._frozen = self._whole_position()
            measured, unchanged = self.queue.ask(partial(self._measured_before, self._frozen.step))
            if self.ring.is_whole():
                break
            if not self.ring.freeze(timeout_s):
                return False
        try:
            self._write_steps(measured)
        except NotFinite:
            return False
        return unchanged

    def _measured_before(self, step: int) -> tuple[list[Measured], bool]:
        """What the steps before this one measured, and whether the chosen state is still what it was."""
        return self.readback.read_now(step), self._unchanged()

    def freeze_copies(self, timeout_s: float) -> list[HeldCopy]:
        """Let the copies in host memory change no more. Call after `freeze`. Returns what can be saved of them."""
        copies = self.copies
        if copies is None or not self.restored:
            return []

        def write(measured: Sequence[Measured]) -> None:  # of a rank that cannot read them from its device any more
            if self._lock_records(timeout_s):
                with contextlib.suppress(NotFinite):
                    self._write_steps([one for one in measured if one.step >= self.readback.first_step])

        copies.freeze(write)
        return self._held_copies(copies)

    def _held_copies(self, copies: Copies) -> list[HeldCopy]:
        """What can be saved of the frozen copies: nothing after a step that was not finite."""
        own = copies.own() if self.restored else []
        kept = copies.kept() if self.restored else []
        return [
            *(HeldCopy(copy.position.place, self.place.shard, len(copy.data), True) for copy in own),
            *(HeldCopy(copy.place, copies.ward_shard, len(copy.data), False) for copy in kept),
        ]

    @contextlib.contextmanager
    def frozen(self, place: Place | None = None) -> Iterator[FrozenState]:
        """The state that `freeze` has frozen, or what copies hold at a place, to be saved by a thread other than the
        one that trains. Raises StateChanged if this rank holds nothing there, and DeviceSilent."""
        own = self.copies.own_at(place) if self.copies and place else None
        copies = self.copies.at(place) if self.copies and place else {}
        live = own is None and self._frozen_live and place in (None, self.position.place)
        if not live and not copies:
            raise StateChanged
        if live:
            self.position.records = self.metrics.count

        def hold() -> FrozenState:
            info, state = own.info if own else self._checkpoint_info(), self._frozen_state() if live else None
            return FrozenState(
                *(self.store, info, state, self.size, self.metrics.rewrite_tail, self._host_buffer),
                *(self.ring.is_whole if live else lambda: True, self.place, copies, own.structure if own else None),
                ask=self.queue.ask,
            )

        yield self.queue.ask(hold) if live else hold()

    def _lock_records(self, timeout_s: float) -> bool:
        """Let the thread that trains write no more lines; once, for good."""
        self._records_locked = self._records_locked or self.records_lock.acquire(timeout=timeout_s)
        return self._records_locked

    def _unchanged(self) -> bool:
        """Whether the chosen state is still what it was, except for what changes within updates."""
        held = self.ring.held
        return held is None or held.state.unchanged()

    def _whole_position(self) -> Position:
        """A copy of the position of the state that the ring has chosen."""
        held, now = self.ring.held, self.position
        position = copy.copy(self._position if held is None else held.position)
        # These follow the lines written so far, and lines are written only of steps that the device has finished.
        position.loss_sum, position.loss_samples, position.skipped = now.loss_sum, now.loss_samples, now.skipped
        return position

    def _hold_step(self) -> HeldStep:
        return HeldStep(copy.copy(self._position), self._hold())

    def _frozen_state(self) -> dict[str, Any]:
        held = self.ring.held
        return {"position": asdict(self.position), **(self._state() if held is None else held.state.state)}

    def _end_update(self, measured: Mapping[str, Tensor], samples: int, batches: int = 0) -> None:
        """The step is done, as far as the CPU is concerned: count it."""
        self._count_step(measured, samples, batches)
        self.ring.end_update()
        if self.copies is not None:
            self._copy(self.copies)

    def _count_step(self, measured: Mapping[str, Tensor], samples: int, batches: int = 0) -> None:
        position = self._position
        self.readback.add(position.step, measured)
        position.step += 1
        position.batches += batches
        position.samples += samples

    def _copy(self, copies: Copies) -> None:
        """After an update: take a copy, or make sure of the last one, if either is due."""
        step = self._position.step
        if copies.is_due(step):
            with self.ring.waiting():
                state, measured = {"position": asdict(self._position), **self._state()}, self.readback.read_now(step)
            copies.take(copy.copy(self._position), self._checkpoint_info(), state, measured)
        if copies.is_due(step + 1):
            copies.complete()

"""Brings the values that steps measure from the device to the host, without making the device wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from laststep.checkpoint.manager import CheckpointManager
from laststep.observe.progress import Progress
from laststep.ranks.device import start_copy_to_host
from laststep.ranks.group import Group

COUNTDOWN_S = 1.0  # how often rank 0 announces how far away the next save is


class Measured(NamedTuple):
    """What one finished step measured."""

    step: int  # from 0
    values: dict[str, float]


class _Request(NamedTuple):
    """A copy to the host under way."""

    steps: int  # how many of the pending steps it covers
    has_countdown: bool  # whether its last value is rank 0's countdown to the next save
    values: Callable[[], list[float]]  # waits for the copy


class Readback:
    """The values of finished steps that are not in metrics.jsonl yet.

    They stay on the device, where no step waits for them. `request` starts to copy the values of all steps so far to
    the host; `collect` waits for that copy. `remove` needs the loop's `records_lock`, since a rescue in another thread
    reads these values too. `add` needs none: it only appends.

    Ranks must agree on when to save, and their clocks differ. So about once a second a request also carries a countdown
    from rank 0: how many steps later to ask it again, or 0 when a save is due now.
    """

    def __init__(self, group: Group, saves: CheckpointManager, progress: Progress) -> None:
        self._group = group
        self._saves = saves
        self._progress = progress
        self._pending: list[tuple[int, Mapping[str, Tensor]]] = []  # step (from 0), its scalars on the device
        self._request: _Request | None = None
        self._countdown_at = 0  # the step after which rank 0 is asked again

    @property
    def requested(self) -> bool:
        """Whether a request is waiting to be collected."""
        return self._request is not None

    @property
    def first_step(self) -> int:
        """The oldest pending step (from 0)."""
        return self._pending[0][0] if self._pending else 0

    def add(self, step: int, measured: Mapping[str, Tensor]) -> None:
        """Hold what `step` (from 0) measured: scalars on the device."""
        self._pending.append((step, measured))

    def request(self, steps_done: int) -> None:
        """Start to copy the values of all steps so far to the host. A collective."""
        scalars = [tensor for _, measured in self._pending for tensor in measured.values()]
        if has_countdown := steps_done >= self._countdown_at:
            scalars.append(self._countdown())
        self._request = _Request(len(self._pending), has_countdown, start_copy_to_host(scalars))

    def collect(self, steps_done: int) -> list[Measured]:
        """Wait for the requested values. They stay pending until `remove`."""
        assert self._request is not None
        request, self._request = self._request, None
        values = request.values()
        if request.has_countdown:
            self._saves.due |= values[-1] == 0
            self._countdown_at = steps_done + int(values[-1])
        return self._by_step(request.steps, values)

    def read_now(self, until: int) -> list[Measured]:
        """The values of the pending steps before `until` (from 0). Not a collective.

        One by one: that is slow, but takes no memory on the device.
        """
        pending = [(step, measured) for step, measured in self._pending if step < until]
        return [Measured(step, {name: float(value) for name, value in measured.items()}) for step, measured in pending]

    def forget(self, step: int) -> None:
        """Forget the pending steps from `step` (from 0) on: they will be measured anew."""
        self._pending = [(pending, measured) for pending, measured in self._pending if pending < step]

    def remove(self, count: int) -> None:
        """Forget the oldest `count` pending steps: they are in metrics.jsonl."""
        del self._pending[:count]

    def _countdown(self) -> Tensor:
        """Steps until rank 0 is to be asked again, 0 when a save is due; a scalar, the same on every rank."""
        left_s = self._saves.due_in_s()
        steps = 0 if left_s <= 0 else max(1, min(left_s, COUNTDOWN_S) // self._progress.step_s())
        countdown = torch.full((), steps, dtype=torch.float64, device=self._group.device)
        self._group.broadcast([countdown])
        return countdown

    def _by_step(self, steps: int, values: list[float]) -> list[Measured]:
        remaining = iter(values)
        pending = self._pending[:steps]
        return [Measured(step, {name: next(remaining) for name in measured}) for step, measured in pending]

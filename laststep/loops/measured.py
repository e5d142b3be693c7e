"""The values that steps measure, on their way from the device to metrics.jsonl, without making the device wait."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laststep.checkpoint.manager import CheckpointManager
from laststep.config.errors import ConfigError
from laststep.ranks.device import start_copy_to_host
from laststep.ranks.group import Group, tree_sum
from laststep.records.progress import Progress

COUNTDOWN_S = 1.0  # how often rank 0 announces how far away the next save is
MAX_NAMES = 32  # of a step's values: ranks broadcast a row with a place for each name, whether it is in use or not


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

    def add_to_last(self, measured: Mapping[str, Tensor]) -> None:
        """The last step has measured this, too."""
        step, before = self._pending[-1]
        self._pending[-1] = step, {**before, **measured}

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
        remaining, pending = iter(values), self._pending[: request.steps]
        return [Measured(step, {name: next(remaining) for name in measured}) for step, measured in pending]

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


class LoggedValues:
    """Values by name. Rank 0's count.

    A step's values stay on the device, so that logging them waits for nothing. The other ranks receive those logged
    before the step's update with that update, and the rest at the end of the step: any of them may have to write its
    line.
    """

    def __init__(self, group: Group, best_by: str) -> None:
        self._group = group
        self.row = torch.zeros(MAX_NAMES, dtype=torch.float64, device=group.device)  # of the step under way
        self._places = {"lr": 0}
        self._names: list[str] = []  # that this step has logged
        self._parts: list[tuple[Tensor, list[str]]] = []  # a row and its names for each share or micro-batch
        self._averaged = False  # whether the step's row has the means of its micro-batches
        self._rows: list[Tensor] = []  # of finished steps, not synced yet
        self._best_by = best_by
        self._validation: dict[str, Any] | None = None  # of a validation within this step, which begins with its step
        self._epoch: dict[str, Any] = {}
        self._ended_epoch: dict[str, Any] = {}  # of the epoch that has just ended

    def log_step(self, values: Mapping[str, Any]) -> None:
        """Log values of this step or of its share or micro-batch, numbers or tensors of one element. Raises
        ConfigError."""
        row, names = self._parts[-1] if self._parts else (self.row, self._names)
        for name, value in values.items():
            if self._validation is not None and (name.startswith("val_") or name == self._best_by):
                self._validation[name] = value
                continue
            place = self._places.setdefault(name, len(self._places))
            if place >= MAX_NAMES:
                raise ConfigError(f"run.log({name}=...): a run logs at most {MAX_NAMES} different values per step")
            try:
                row[place] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
            except (TypeError, ValueError, RuntimeError):
                raise ConfigError(f"run.log({name}=...): must be a number, or a tensor of one element") from None
            names.append(name)
            if self._averaged:
                self._average(name)

    def begin_micro_batch(self) -> None:
        """What is logged from now on is of one micro-batch; the step's values are the means over them."""
        self._parts.append((torch.zeros_like(self.row), []))

    def average_micro_batches(self) -> None:
        """Log, as values of the step, the means over the micro-batches that have logged them."""
        self._averaged = bool(self._parts)
        for name in dict.fromkeys(name for _, logged in self._parts for name in logged):
            self._average(name)

    def _average(self, name: str) -> None:
        place = self._places[name]
        self.row[place] = torch.stack([row[place] for row, logged in self._parts if name in logged]).mean()
        self._names.append(name)

    def begin_share(self) -> None:
        """What is logged from now on are means over the samples of one share."""
        self._parts.append((torch.full_like(self.row, math.nan), []))

    def end_shares(self, weights: Sequence[float]) -> None:
        """Log the means over the samples of all shares, of which this rank's count by these weights. A collective.

        Raises ConfigError for a value that only some of this rank's shares have logged. A mean is NaN if only another
        rank's have.
        """
        shares, self._parts = self._parts, []
        names = list(dict.fromkeys(name for _, logged in shares for name in logged))
        for name in names:
            if not all(name in logged for _, logged in shares):
                raise ConfigError(f"run.log({name}=...): logged in some shares only; log it in each, or after them")
        own = tree_sum(torch.stack([row * weight for (row, _), weight in zip(shares, weights)]))
        total = tree_sum(torch.stack(self._group.gather(own)))
        for name in names:
            self.row[self._places[name]] = total[self._places[name]]
        self._names += names

    def begin_validation(self, step: int) -> None:
        """A validation of the state after `step` begins within this step. Its values are those named val_ and that by
        which checkpoints are ranked."""
        self._validation = {"step": step}

    def end_validation(self) -> dict[str, Any] | None:
        """The step that has been validated within this step, and rank 0's values, as numbers; None if there was none. A
        collective if there was one."""
        values, self._validation = self._validation, None
        return None if values is None else _from_rank_0(as_numbers("run.log", values), self._group)

    def log_learning_rate(self, lr: float | Tensor) -> None:
        """Log the learning rate of this step, unless the function has logged one itself."""
        if "lr" not in self._names:
            self.log_step({"lr": lr})

    def end_step(self) -> dict[str, Tensor]:
        """The values that the step has logged; what is logged next belongs to the next step."""
        row = self.row.clone()
        self._rows.append(row)
        logged = {name: row[self._places[name]] for name in self._names}
        self._names.clear()
        self._parts.clear()
        self._averaged = False
        return logged

    def sync_steps(self) -> None:
        """Give every rank rank 0's values of finished steps: overwrites in place what `end_step` returned. A
        collective."""
        if self._group.world.size == 1:
            self._rows.clear()
        elif self._rows:
            rows = torch.stack(self._rows)
            self._group.broadcast([rows])
            for old, new in zip(self._rows, rows):
                old.copy_(new)
            self._rows.clear()

    def log_epoch(self, values: Mapping[str, Any]) -> None:
        """Log values of this epoch."""
        self._epoch.update(values)

    def end_epoch(self) -> None:
        """What is logged next belongs to the next epoch."""
        self._ended_epoch, self._epoch = self._epoch, {}

    def epoch_values(self, include_open: bool) -> dict[str, Any]:
        """Take rank 0's values of the epoch that has ended: another rank may have to write them for it. With
        `include_open` also those logged since: the function may have left its loop over epochs by a break. A
        collective."""
        values, self._ended_epoch = {**self._ended_epoch, **(self._epoch if include_open else {})}, {}
        return _from_rank_0(as_numbers("run.log", values), self._group)


def _from_rank_0(values: dict[str, Any], group: Group) -> dict[str, Any]:
    """Rank 0's values, on every rank. A collective."""
    found: dict[str, Any] = json.loads(group.broadcast_bytes(json.dumps(values).encode()))
    return found


def as_numbers(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, and tensors of one element, as JSON has them. Raises ConfigError, which names `source`, for others."""
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = value if isinstance(value, int) else finite(float(value))
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"{source}: {name} must be a number, or a tensor of one element") from None
    return found


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None

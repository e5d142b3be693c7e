"""What a function logs: of a step, scalars that stay on the device, so that nothing waits; of an epoch, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.config.errors import ConfigError
from trainer.loops.loop import finite
from trainer.world.group import Group

NAMES = 32  # of a step's values at most: the ranks hand all of them around, whatever each of them has logged


class Log:
    """Values by name. Those of rank 0 count: of a step the other ranks hear them before its update, as far as they are
    logged by then, and the rest before metrics.jsonl is written to."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.row = torch.zeros(NAMES, dtype=torch.float64, device=group.device)  # of the step under way
        self._places = {"lr": 0}
        self._names: list[str] = []  # that this step has logged
        self._rows: list[Tensor] = []  # of steps before
        self._epoch: dict[str, Any] = {}
        self._ended: dict[str, Any] = {}  # of the epoch that has just ended

    def of_step(self, values: Mapping[str, Any]) -> None:
        """Enter values of this step, numbers or tensors of one element. Raises ConfigError."""
        for name, value in values.items():
            place = self._places.setdefault(name, len(self._places))
            if place >= NAMES:
                raise ConfigError(f"run.log({name}=...): a run logs at most {NAMES} different values per step")
            try:
                self.row[place] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
            except (TypeError, ValueError, RuntimeError):
                raise ConfigError(f"run.log({name}=...): must be a number, or a tensor of one element") from None
            self._names.append(name)

    def rate(self, lr: float | Tensor) -> None:
        """The learning rate of this step, unless the function has logged one itself."""
        if "lr" not in self._names:
            self.of_step({"lr": lr})

    def end_step(self) -> dict[str, Tensor]:
        """What the step has logged."""
        row = self.row.clone()
        self._rows.append(row)
        logged = {name: row[self._places[name]] for name in self._names}
        self._names.clear()
        return logged

    def level(self) -> None:
        """Make what `end_step` gave rank 0's on every rank. A collective."""
        if self._rows:
            rows = torch.stack(self._rows)
            self._group.broadcast([rows])
            for old, new in zip(self._rows, rows):
                old.copy_(new)
            self._rows.clear()

    def of_epoch(self, values: Mapping[str, Any]) -> None:
        """Enter values of this epoch."""
        self._epoch.update(values)

    def end_epoch(self) -> None:
        """What is entered from now on is of the next."""
        self._ended, self._epoch = self._epoch, {}

    def epoch(self, open_too: bool) -> dict[str, Any]:
        """What the epoch has logged that has ended, or (`open_too`) was left without that."""
        return numbers("run.log", {**self._ended, **(self._epoch if open_too else {})})


def numbers(said_by: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, and tensors of one element, as JSON has them. Raises ConfigError for anything else."""
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = value if isinstance(value, int) else finite(float(value))
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"{said_by}: {name} must be a number, or a tensor of one element") from None
    return found

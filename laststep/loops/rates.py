"""The learning rate of each parameter group at each step."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from laststep.config.errors import ConfigError
from laststep.optim.build import scheduled
from laststep.task import Task


class LearningRates:
    """Each group's initial learning rate times the task's schedule: a pure function of the step, so no checkpoint holds
    it."""

    def __init__(self, task: Task, optimizer: Optimizer, total_steps: int) -> None:
        """The optimiser is new: its groups have their initial learning rates."""
        self._task, self._optim = task, task.config.optim
        self._is_default = getattr(task.schedule, "__func__", None) is Task.schedule
        self._initial = [float(group["lr"]) for group in optimizer.param_groups]
        self._total = total_steps

    def at(self, step: int) -> list[float]:
        """The learning rate of each group at `step` (from 0). Raises ConfigError when the schedule gives none."""
        if self._is_default:  # not by its factor, which would round once more
            return [scheduled(lr, self._optim, step, self._total) for lr in self._initial]
        value: Any = self._task.schedule(step, self._total)
        try:
            factor = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            factor = math.nan
        if not 0 <= factor < math.inf:
            raise ConfigError(
                f"task={self._task.config.task}: schedule({step}, {self._total}) returned {value!r}; "
                "it must return a finite number, at least 0"
            )
        return [lr * factor for lr in self._initial]

"""The batches of a second loader, which follow the steps of the first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from laststep.config.errors import ConfigError
from laststep.data.loader import StepLoader
from laststep.data.order import preserved_generators


class SideBatches(Iterator[Any]):
    """`per_step` batches for each step: which ones follows from the number of the step alone, over all epochs. A step
    may leave some out. With train.shares it is a batch for each share."""

    def __init__(self, loader: StepLoader, per_step: int, open_step: Callable[[], int | None], shares: int = 1) -> None:
        """`open_step()` is the step (from 0) whose turn it is, None outside the turns. Of several `shares`, each counts
        as a step: the loader gives them one after another."""
        self._loader, self._shares = loader, shares
        self._per_step = per_step
        self._open_step = open_step
        self._step, self._taken = -1, 0
        self._batches: Iterator[Any] = iter(())
        self._next = -1  # the number of their next batch

    def __next__(self) -> Any:
        step = self._open_step()
        if step is None:
            raise ConfigError(
                "next(...) on run.batches(...) outside the iterations of run.steps(...), or of run.shares(...) with "
                "train.shares: draw each batch in the iteration that uses it"
            )
        if step != self._step:
            self._step, self._taken = step, 0
        if self._taken == self._per_step:
            raise ConfigError(
                f"run.batches(...) has {self._per_step} for each step, and this iteration draws more; write "
                f"run.batches(loader, per_step={self._per_step + 1})"
            )
        number = step * self._per_step + self._taken
        if number != self._next:
            first, earlier = divmod(number, self._shares)
            self._batches = islice(self._loader.batches(first, sys.maxsize - first), earlier, None)
        with preserved_generators():  # a sample that this process loads is seeded by its own number
            batch = next(self._batches)
        self._taken, self._next = self._taken + 1, number + 1
        return batch

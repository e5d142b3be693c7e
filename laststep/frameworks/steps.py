"""The steps and validations of a run, as loaders for a framework that has its own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from laststep.config.errors import ConfigError
from laststep.data.loader import StepLoader
from laststep.loops.run import Run, loop_of

NOT_IN_SHARES = "a framework's own loop cannot compute in shares; write a loop over run.shares(...), or remove this key"


class FrameworkSteps:
    """A loader that the framework iterates over once per epoch: each batch is one step, one update.

    Nothing happens before the first batch of an epoch is asked for, so a framework may ask for iterators in advance.
    The framework must not ask for a batch before the update of the one before.
    """

    def __init__(self, run: Run, loader: Any, plan: Callable[[], tuple[int, int | None]]) -> None:
        """`plan` returns the number of epochs, and the number of steps of the run or None; it is asked at the first
        batch."""
        if not isinstance(loader, StepLoader):
            kind = type(loader).__name__
            raise ConfigError(f"the training loader must be what run.loader(dataset, batch_size) gave, not a {kind}")
        if run.config.train.shares is not None:
            raise ConfigError(f"train.shares={run.config.train.shares}: {NOT_IN_SHARES}")
        self._run, self._loop, self._loader, self._plan = run, loop_of(run), loader, plan
        self._epochs: Iterator[int] | None = None
        self._batches: Iterator[Any] = iter(())
        self.steps_per_epoch = len(loader)
        self._count = 0  # steps of this epoch
        self.resumed_over = False  # the steps of this epoch were over when the attempt began
        self.at_resumed_end: Callable[[], None] = lambda: None  # called then, before the loader is exhausted

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if self._epochs is None:
            epochs, steps = self._plan()
            self._steps = steps
            self._epochs = self._run.epochs(epochs)
        epoch = next(self._epochs)
        left = self.steps_per_epoch if self._steps is None else self._steps - epoch * self.steps_per_epoch
        self._count = min(self.steps_per_epoch, left)
        self._batches = self._run.steps(self._loader, self._count)
        self.resumed_over = True
        for batch in self._batches:
            self.resumed_over = False
            yield batch
        if self.resumed_over:
            self.at_resumed_end()

    @property
    def last_of_epoch(self) -> bool:
        """Whether the epoch has no batch after the one given last."""
        return self._loop.engine.position.batches + 1 >= self._count

    def end_step(self) -> None:
        """The open step is done: all that it changes has changed. A collective."""
        self._loop.end_step()

    def end_epoch(self) -> None:
        """The steps of this epoch are over, the open one included; a validation may follow. A collective."""
        self._loop.end_steps()


class FrameworkValidation:
    """A loader for validation, in which the ranks can stop. Anything else is asked of the framework's own loader."""

    def __init__(self, run: Run, loader: Any) -> None:
        self._run, self._loader = run, loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._run.validation(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

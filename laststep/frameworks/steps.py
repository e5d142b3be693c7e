"""The steps and validations of a run, as loaders for a framework that has its own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from laststep.config.errors import ConfigError
from laststep.data.loader import StepLoader
from laststep.loops.run import Run, loop_of

NOT_IN_SHARES = "a framework's own loop cannot compute in shares; write a loop over run.shares(...), or remove this key"


def adopted(run: Run, loader: Any) -> StepLoader:
    """What run.loader(...) gives for the samples of a DataLoader, whose batches are one rank's: shuffled in each epoch,
    or in its own order. Raises ConfigError for one that cannot start at any step."""
    if isinstance(loader, StepLoader):
        return loader
    if not isinstance(loader, DataLoader):
        kind = type(loader).__name__
        raise ConfigError(f"the training loader must be one DataLoader, or what run.loader(...) gave, not a {kind}")
    if type(loader.batch_sampler) is not BatchSampler and hasattr(loader.dataset, "__len__"):
        kind = "batch_size=None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        raise ConfigError(
            f"the training DataLoader makes its batches by {kind}, which cannot start in the middle; give it a "
            "batch_size, and the order by a sampler"
        )
    sampler: Any = loader.sampler
    shuffles = sampler.shuffle if type(sampler) is DistributedSampler else type(sampler) is RandomSampler
    if type(sampler) in (DistributedSampler, SequentialSampler, RandomSampler):
        sampler = None if shuffles else range(len(loader.dataset))  # type: ignore[arg-type]
    return run.loader(
        loader.dataset,
        (loader.batch_size or 1) * run.size,
        loader.num_workers,
        None if loader.collate_fn is default_collate else loader.collate_fn,
        sampler=sampler,
        drop_last=loader.drop_last,
        persistent_workers=loader.persistent_workers,
    )


class FrameworkSteps:
    """A loader that the framework iterates over once per epoch: it makes one update of each `accumulate` batches.

    Nothing happens before the first batch of an epoch is asked for, so a framework may ask for iterators in advance.
    The framework must not ask for the first batch of a step before the update of the step before.
    """

    def __init__(
        self, run: Run, loader: StepLoader, plan: Callable[[], tuple[int, int | None]], accumulate: int = 1
    ) -> None:
        """`plan` returns the number of epochs, and the number of steps of the run or None; it is asked at the first
        batch."""
        if run.config.train.shares is not None:
            raise ConfigError(f"train.shares={run.config.train.shares}: {NOT_IN_SHARES}")
        self._run, self._loop, self._loader, self._plan = run, loop_of(run), loader, plan
        self._epochs: Iterator[int] | None = None
        self._batches: Iterator[Any] = iter(())
        self.accumulate, self.steps_per_epoch = accumulate, -(-len(loader) // accumulate)
        self._count = 0  # steps of this epoch
        self.resumed_over = False  # the steps of this epoch were over when the attempt began
        self.at_resumed_end: Callable[[], None] = lambda: None  # called then, before the loader is exhausted

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._epochs is None:
            epochs, steps = self._plan()
            self._steps = steps
            self._epochs = self._run.epochs(epochs)
        epoch = next(self._epochs)
        left = self.steps_per_epoch if self._steps is None else self._steps - epoch * self.steps_per_epoch
        self._count = min(self.steps_per_epoch, left)
        self._batches = self._run.steps(self._loader, self._count, accumulate=self.accumulate)
        self.resumed_over = True
        for batch in self._batches:
            self.resumed_over = False
            yield batch
        if self.resumed_over:
            self.at_resumed_end()

    def next_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of the next step, for a framework that draws all of them before it trains the first; `batches` is
        what `iter` of this loader gave."""
        for batch in batches:
            yield batch
            if self._run.sync_gradients:
                return

    @property
    def last_of_epoch(self) -> bool:
        """Whether the epoch has no batch after the one given last."""
        return self._run.sync_gradients and self._loop.engine.position.batches + 1 >= self._count

    def end_step(self) -> None:
        """The framework is done with a batch. If it was the last of its step, all that the step changes has changed. A
        collective."""
        if self._run.sync_gradients:
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

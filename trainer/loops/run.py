"""Run: what a hand-written training function is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.loader import LoaderFactory, StepLoader
from trainer.data.order import Order
from trainer.loops.custom_loop import CustomLoop
from trainer.loops.loop import AttemptContext


class Run:
    """A run, as the function that `task: package.module.function` names sees it. Every rank calls that function:

        def main(run):
            loader = run.loader(train_set, batch_size=64)
            run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
            for epoch in run.epochs(5):
                for x, y in run.steps(loader):
                    ...
                for x, y in run.validation(val_loader):
                    ...

    The process group is set up. Each step and each batch of the validation begins with every generator seeded from
    (seed, step, rank), so a resumed run draws the same numbers. A stop leaves the function from within one of the two
    inner loops, with everything saved; the next attempt calls it again, and these loops go on where the run was.

    The function returns the run's result, a dict of numbers, or nothing: then that is what the last epoch has logged.
    """

    def __init__(self, loop: CustomLoop) -> None:
        self._loop = loop
        world = loop.group.world
        self.rank, self.size, self.local_rank = world.rank, world.size, world.local_rank
        self.device = loop.group.device
        self.config = loop.config

    @property
    def step(self) -> int:
        """Steps done so far, from the start of the run."""
        return self._loop.position.step

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> StepLoader:
        """For `steps`: this rank's shares of batches of `batch_size` samples over all ranks, shuffled in each epoch
        anew, and the same whichever attempt loads them. An epoch's last batch may be short.

        A sample may draw random numbers: generators are seeded from (seed, epoch, sample index) before it.
        """
        if not len(dataset):
            raise ConfigError("run.loader(): the data set is empty")
        if batch_size % self.size:
            raise ConfigError(f"run.loader(batch_size={batch_size}): not divisible by {self.size} ranks")
        loading = LoaderFactory(collate_fn, num_workers, self.device, self.config.launch.hang_timeout_s)
        order = Order(len(dataset), batch_size, self.config.seed)
        loader = StepLoader(loading, dataset, order, self.rank, self.size)
        self._loop.loaders.append(loader)
        return loader

    def restore(self, **objects: Any) -> None:
        """Register whatever a checkpoint is to hold, and put in what the newest one has of it. Call it once, before
        the first step.

        The model is registered as the DistributedDataParallel that it is wrapped in. Each object has state_dict() and
        load_state_dict(), or is a dict, and is the same on every rank.
        """
        self._loop.register(objects)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs, from 0, that are left of `count`; the first of them may be half done."""
        return self._loop.epochs(count)

    def steps(self, loader: StepLoader, count: int | None = None) -> Iterator[Any]:
        """The batches of the steps that are left of this epoch. A turn of the loop over them is a step: it ends with
        one whole update of what is registered.

        An epoch has `count` steps; by default it goes once over the data.
        """
        return self._loop.steps(loader, count)

    def validation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader that has as many on every rank. Before each the ranks can stop: then what comes after
        the steps of this epoch is done again as a whole."""
        return self._loop.validation(loader)

    def log(self, **values: Any) -> None:
        """Enter numbers, or tensors of one element, in metrics.jsonl: within a step in that step's line, else in the
        epoch's. Those of rank 0 count. A step's are best logged before its update: then every rank has them, to write
        them down should rank 0 die; of later ones the others hear every `train.log_every` steps."""
        self._loop.log(values)


def loop_of(function: Callable[[Run], Any], means: AttemptContext) -> CustomLoop:
    """The loop around a function."""
    return CustomLoop(lambda loop: function(Run(loop)), means)

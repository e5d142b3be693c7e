"""The loop around a user's training function: it hands out batches, and leaves the function when the ranks stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laststep.data.loader import StepLoader, StepNumbers, end_workers
from laststep.loops import misuse
from laststep.loops.custom_sharding import hold_shard
from laststep.loops.custom_steps import IN_BODY, STEP_OPEN, CustomSteps, Event, Framework, Phase
from laststep.loops.logged import as_numbers
from laststep.loops.loop import AttemptContext
from laststep.loops.rehearsal import rehearse
from laststep.loops.side_batches import SideBatches
from laststep.loops.turn_checks import TurnChecks
from laststep.loops.user_loaders import UserLoaders
from laststep.say import counted


class LeaveFunction(BaseException):
    """The ranks agreed to stop, and everything is saved. Not an Exception, so that the function does not catch it."""


class CustomLoop(CustomSteps):
    """Calls a function that has its own training loop. The public methods are what the function calls, through Run."""

    def __init__(self, function: Callable[[CustomLoop], Any], context: AttemptContext) -> None:
        super().__init__(context)
        self.function, self.run_dir = function, context.run
        self.loaders = UserLoaders(self.group, self.config.task, self.shares.here)
        self._function_epoch, self._epochs = 0, 1  # the epoch the function is in (from 0), and their number
        self.group.connect_alone()

    def register(
        self,
        objects: Mapping[str, Any],
        averages_gradients: bool = False,
        framework: Framework | None = None,
        rehearses: bool = True,
    ) -> None:
        """Hold the state of these objects from now on, and load what the checkpoint has of them; `framework` saves and
        loads the rest of the state. `averages_gradients`: the function does so itself, without DistributedDataParallel.
        `rehearses`: the first forward pass, see `rehearsal`."""
        if self.phase is not Phase.SETUP:
            raise self._misuse("run.restore(...) or run.checkpoint(...) twice; register everything at once")
        self.startup.done("data and model")
        self.watch.enter("restoring")
        registered = self._held.register(objects, opaque=framework is not None)
        self.place = registered.place
        hold_shard(self.place, self.saves, self.numerics, self._held.checkpoint, self.progress.say)
        self._too_early.remove()
        self._move(Event.RESTORE)
        if problem := self.shares.register(registered, averages_gradients or framework is not None):
            raise self._misuse(problem)
        rehearses &= self.config.train.rehearsal and self.shares.total is None
        if rehearses and self.size > 2:  # a sum of two is the same in either order
            for module, ddp in registered.parallel:
                rehearse(module, ddp, self.group.device)
        for optimizer in registered.optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)
        self._checks = TurnChecks(registered)
        self._held.restore()
        if framework is not None:
            self._restore_framework(framework)
        self._finish_restore()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, from 0; the first may be half done."""
        self._epochs = count
        for epoch in range(self.position.epoch, count):
            self._function_epoch = epoch
            self._seed("epoch", epoch)
            yield epoch
            self._logged.end_epoch()

    def steps(self, loader: StepLoader | StepNumbers, count: int | None) -> Iterator[Any]:
        """The batches of the steps that are left of this epoch. It has `count` steps; None: once over the data."""
        position = self.position
        count = self._begin_steps(loader, count)
        if not position.over:
            batches = loader.batches(position.step, count - position.batches)
            try:
                for number in range(position.batches + 1, count + 1):
                    if self.saves.due:
                        self.save()
                    if not self.stop.begin_tick():
                        self._leave()
                    self._checks.begin(position.step)
                    batch = self.shares.begin_step(position.step, loader, batches)
                    self._samples = loader.samples(position.step)
                    self._move(Event.BATCH)
                    torch.clear_autocast_cache()  # autocast around the whole loop would go on with old weights
                    yield batch
                    self.end_step(ends_epoch=number == count)
            except GeneratorExit:  # by a break, whose step `end_steps` closes, or by an error on its way out
                if self.phase is Phase.UPDATING:
                    self._held.break_off()
                raise
            finally:
                if self.phase in IN_BODY:
                    self._move(Event.BROKEN_OFF)
        self.end_steps()

    def end_step(self, ends_epoch: bool = False) -> None:
        """Close the step in whose body the function is, if it is in one. A framework does that itself, before it asks
        for the next batch: between the two it may wait for the other ranks."""
        if self.phase in IN_BODY:
            self._checks.end(self.position.step)
            self._end_step(ends_epoch)

    def share_batches(self, batch: Any) -> Iterator[Any]:
        """This rank's shares of the batch of the open step, or that batch itself."""
        return self.shares.of(batch)

    def batches(self, loader: StepLoader, per_step: int) -> SideBatches:
        """The batches of a second loader, `per_step` for each step."""
        if problem := misuse.of_batches(loader, per_step, self.shares.total):
            raise self._misuse(problem)
        unit = lambda: self.shares.unit(self.position.step) if self.phase in IN_BODY else None  # noqa: E731
        return SideBatches(self.loaders.another(loader, self.config.seed), per_step, unit, self.shares.here)

    def validation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader. The ranks can stop before each of them."""
        if self.phase in IN_BODY:
            self._logged.begin_validation(self.position.step + (self.phase is Phase.UPDATING))
        else:
            self.end_steps()
        self.loaders.prepare(loader)
        batches = iter(loader)
        try:
            for number, batch in enumerate(batches):
                # Within a step, or when the state has changed since the epoch's steps, a run could not resume from
                # here. Then the ranks stop at the next place where it can.
                if not self.stop.begin_tick() and self._can_leave_validation():
                    self._leave()
                self._seed("validate", self.position.step, number)
                yield batch
        finally:
            if not getattr(loader, "persistent_workers", False):
                end_workers(batches)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values for the line of the open step, or else of the epoch."""
        log = self._logged.log_step if self.phase in STEP_OPEN else self._logged.log_epoch
        log(values)

    def _train(self) -> bool:
        if self.position.finished:
            self._finish_restore()
            return True
        self.watch.enter("preparing data")
        self._seed("function")
        self._too_early = register_optimizer_step_pre_hook(self._updates_too_early)
        try:
            result = self.function(self)
        except LeaveFunction:
            return False
        except SystemExit as error:
            if error.code not in (None, 0):
                raise RuntimeError(f"task={self.config.task}: called sys.exit({error.code})") from error
            result = None
        finally:
            self._too_early.remove()
            self.loaders.close()
        if self.saves.last:  # the function has caught LeaveFunction
            return False
        self._finish(result)
        return True

    def _begin_steps(self, loader: StepLoader | StepNumbers, count: int | None) -> int:
        """Begin, or continue, the steps of the function's epoch; returns how many the epoch has."""
        position = self.position
        if problem := misuse.of_steps(loader, self._held.registered is not None):
            raise self._misuse(problem)
        if self.phase in IN_BODY and self._function_epoch == position.epoch:
            raise self._misuse(misuse.TWICE)
        self.end_steps()
        self._held.snapshot()
        if self.phase is Phase.AFTER_STEPS:
            if self._function_epoch == position.epoch:
                raise self._misuse(misuse.TWICE)
            self._end_epoch(self._epoch_record(include_open=False))
        position.epoch = self._function_epoch
        if isinstance(loader, StepLoader):
            self.loaders.check_order(loader)
        count = len(loader) if count is None else count
        self._announce(count, loader.batch_size)
        self._held.restore_for_first_step()
        self._move(Event.FIRST_BATCH)
        return count

    def _announce(self, count: int, batch_size: int) -> None:
        """Publish how long the run is, if this epoch and all later ones have `count` steps."""
        step = self.position.step
        total = step - self.position.batches + (self._epochs - self._function_epoch) * count
        if total != self.progress.total_steps:
            self._announce_length(total, batch_size)
        if self.watch.phase != "training":
            self.watch.enter("training")
            begins = "starting" if self._held.checkpoint is None else f"resuming after step {step}"
            ranks = f"{counted(self.size, 'rank')} on {self.group.device.type}"
            self.progress.say(f"{begins}: {counted(total, 'step')}, {count} per epoch, {ranks}")

    def _finish(self, result: Any) -> None:
        """The function has returned."""
        trained = self.phase is not Phase.READY or self.position.step > 0
        if problem := misuse.of_return(result, self.phase is not Phase.SETUP, trained):
            raise self._misuse(problem)
        self.end_steps()
        if self.phase is Phase.AFTER_STEPS:
            self._end_epoch(self._epoch_record(include_open=True))
        with self.records_lock:
            self.position.finished = True
            if result is not None:
                self.position.metrics = as_numbers(f"task={self.config.task}: the result", result)

    def _updates_too_early(self, *_: Any) -> None:
        raise self._misuse(misuse.UPDATE_TOO_EARLY)

    def _leave(self) -> NoReturn:
        """Save everything, and leave the function."""
        self._save_last()
        raise LeaveFunction

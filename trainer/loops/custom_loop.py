"""The loop around a hand-written one: it leads that from step to step, and out of it when the ranks stop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from trainer import compat
from trainer.config.errors import ConfigError
from trainer.data.loader import StepLoader, end_workers, set_up_workers
from trainer.data.order import nth_seed, seed_generators, seed_of
from trainer.loops.logged import Log, numbers
from trainer.loops.loop import AttemptContext, Loop, NotFinite, finite
from trainer.loops.registered import Kept, Registered, State


class Leaving(BaseException):
    """The ranks agreed to stop, and everything is saved. Not an Exception: no loop shall take it for an error."""


class CustomLoop(Loop):
    """Calls a function that trains by itself.

    There are two kinds of places from which a run can go on: between two steps, and where the steps of an epoch are
    over. The state of the latter is kept until what follows the steps, a validation say, is done: where an attempt ends
    within that, the next one does all of it again.

    Within a step the state changes from the first update on; before that, in forward and backward passes, only buffers
    do, and those are kept.
    """

    def __init__(self, function: Callable[[CustomLoop], Any], means: AttemptContext) -> None:
        super().__init__(means)
        self.function = function
        self.registered: Registered | None = None
        self._stored: State | None = None  # what the checkpoint holds, until the first step
        self._log = Log(self.group)
        self._epoch_now, self._epochs = 0, 1  # the epoch that the function is in, and how many there are to be
        self._begun = False  # the steps of this epoch have begun, and are not over
        self._inside = False  # the function is in the body of its loop over steps
        self._samples: int | None = None  # of the step under way
        self._updating = False  # the step under way changes the state: `whole` is held
        self._kept: Kept | None = None  # the state where the steps of the epoch were over
        self._broken: Kept | None = None  # the same, as a break has left them
        self.loaders: list[StepLoader | DataLoader[Any]] = []  # that were met, their workers are to be ended
        self._steps_seed = seed_of("steps", self.config.seed, self.rank)
        self.group.connect_alone()

    def restore(self, step: int | None) -> None:
        """Read the checkpoint of `step`, if there is one: it is put in once the function has registered its objects."""
        if step is not None:
            self._stored = self._load(step)

    def save(self) -> None:
        """See Loop."""
        if self.registered is not None and self._kept is None:
            self.registered.settle()
        super().save()

    def _ask(self) -> None:
        self._log.level()
        super()._ask()

    def freeze(self, timeout_s: float) -> bool:
        """See Loop. What follows the steps of an epoch must have left the state alone."""
        if not super().freeze(timeout_s):
            return False
        with self.last_update.beside():
            return self._kept is None or self._kept.unchanged()

    def register(self, objects: Mapping[str, Any]) -> None:
        """Hold these objects' state from now on, and put in what the checkpoint has of them."""
        if self.registered is not None:
            raise self._wrong("run.restore(...) twice; register everything at once")
        self.phases.done("data and model")
        self.watch.enter("restoring")
        self.registered = Registered(objects, self.group, self._log.row)
        if self.size > 1 and not self.registered.parallel:
            self.progress.say(
                "WARNING: run.restore(...) has no DistributedDataParallel; register that, not what is inside of it, or "
                "the last bits of a resumed run may differ"
            )
        for optimizer in self.registered.optimizers:
            optimizer.register_step_pre_hook(self._before_update)
        if self._stored is not None:
            self.registered.put_in(copy.deepcopy(self._stored))
        self._begin()

    def epochs(self, count: int) -> Iterator[int]:
        """Those that are left, from the one in which the run is."""
        self._epochs = count
        for epoch in range(self.position.epoch, count):
            self._epoch_now = epoch
            self._seed("epoch", epoch)
            yield epoch
            self._log.end_epoch()

    def steps(self, loader: StepLoader, count: int | None) -> Iterator[Any]:
        """The batches of the steps that are left of this epoch, which has `count`, or goes once over the data."""
        position = self.position
        count = self._begin_steps(loader, count)
        if not position.over:
            batches = loader.batches(position.step, count - position.batches)
            self._inside = True
            try:
                for number in range(position.batches + 1, count + 1):
                    if self.saves.due:
                        self.save()
                    if not self.stop.begin_tick():
                        self._leave()
                    batch = next(batches)
                    seed_generators(nth_seed(self._steps_seed, position.step), self.group.device)
                    self._samples = loader.order.count(position.step)
                    yield batch
                    self._end_step(ends_epoch=number == count)
            except GeneratorExit:  # a break, whose step ends here; or an error on its way out
                if self._updating and self.registered is not None:
                    self.registered.keep()
                    self._broken = Kept(self.registered.state())
                raise
            finally:
                self._inside = False
        self._end_steps()

    def validation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader. Before each the ranks can stop."""
        if not self._inside:
            self._end_steps()
        if isinstance(loader, DataLoader) and loader not in self.loaders:
            self._check_length(len(loader))
            set_up_workers(loader)
            self.loaders.append(loader)
        batches = iter(loader)
        try:
            for number, batch in enumerate(batches):
                # Within the body of a step, or where the state has changed since the steps, there is nothing to go on
                # from: the ranks stop when that is done.
                if not self.stop.begin_tick() and self._kept is not None and self._kept.unchanged():
                    self._leave()
                self._seed("validate", self.position.step, number)
                yield batch
        finally:
            if not getattr(loader, "persistent_workers", False):
                end_workers(batches)

    def log(self, values: Mapping[str, Any]) -> None:
        """Remember values for the line of the step that is under way, or else of the epoch."""
        if self._samples is None:
            self._log.of_epoch(values)
        else:
            self._log.of_step(values)

    def _train(self) -> bool:
        if self.position.finished:
            self._begin()
            return True
        self.watch.enter("preparing data")
        self._seed("function")
        try:
            result = self.function(self)
        except Leaving:
            return False
        except SystemExit as error:
            raise RuntimeError(f"task={self.config.task}: called sys.exit({error.code})") from error
        finally:
            for loader in self.loaders:
                if isinstance(loader, StepLoader):
                    loader.close()
                else:
                    end_workers(compat.kept_iterator(loader))
        if self.saves.last:  # somebody has caught Leaving
            return False
        self._finish(result)
        return True

    def _begin_steps(self, loader: StepLoader, count: int | None) -> int:
        """Come to the steps of the epoch in which the function is; returns how many it has."""
        position = self.position
        if self.registered is None:
            raise self._wrong("call run.restore(...) before run.steps(...)")
        if not isinstance(loader, StepLoader):
            raise self._wrong("run.steps(...) takes what run.loader(...) gave")
        self._end_steps()
        self.registered.keep()  # with what the function has changed at the head of the epoch
        if self._kept is not None:  # of an epoch that has ended by now
            if self._epoch_now == position.epoch:
                raise self._wrong("run.steps(...) twice in an epoch; put `for epoch in run.epochs(n)` around it")
            self._end_epoch(self._epoch_record(open_too=False))
        position.epoch = self._epoch_now
        count = len(loader) if count is None else count
        self._announce(count, loader.order.batch_size)
        if self._stored is not None:  # what came before the first step was done before this was saved, too
            self.registered.put_in(self._stored)
            self._stored = None
        self._begun = True
        return count

    def _announce(self, count: int, batch_size: int) -> None:
        """How long the run is, given the steps of this epoch."""
        step = self.position.step
        total = step - self.position.batches + (self._epochs - self._epoch_now) * count
        if total != self.progress.total_steps:
            self._planned(total, batch_size)
        if self.watch.phase != "training":
            self.watch.enter("training")
            begins = "starting" if self._stored is None else f"resuming after step {step}"
            ranks = f"{self.size} ranks on {self.group.device.type}"
            self.progress.say(f"{begins}: {total} steps, {count} per epoch, {ranks}")

    def _before_update(self, *_: Any) -> None:
        """An optimiser is about to change the state: until the end of the step it is not whole."""
        if self._samples is None:
            return
        assert self.registered is not None
        if not self._updating:
            self._log.rate(self.registered.optimizers[0].param_groups[0]["lr"])
        self.registered.share()  # before the lock: it waits for ranks that may be dead
        if not self._updating:
            self.whole.acquire()
            self._updating = True
        self.registered.keep_shared()

    def _end_step(self, ends_epoch: bool) -> None:
        """The body of the function's loop is through."""
        assert self.registered is not None and self._samples is not None
        if not self._updating:  # a gradient scaler has skipped the update
            self._before_update()
        position, samples = self.position, self._samples
        self.registered.keep()
        self.last_update.mark()
        self.pending.append((position.step, self._log.end_step()))
        position.step += 1
        position.batches += 1
        position.samples += samples
        self._samples, self._updating = None, False
        self.whole.release()
        self._step_done(samples, ends_epoch)

    def _end_steps(self) -> None:
        """The steps of this epoch are over."""
        if not self._begun:
            return
        assert self.registered is not None
        if self._samples is not None:  # a break
            self._end_step(ends_epoch=True)
        if self._broken is None:
            self.registered.settle()
        self._kept, self._broken = self._broken or Kept(self.registered.state()), None
        self.position.over, self._begun = True, False
        self._seed("after", self.position.epoch)
        if self.saves.due:
            self.save()

    def _enter_epoch(self, record: dict[str, Any]) -> None:
        super()._enter_epoch(record)
        self._kept = None

    def _finish(self, result: Any) -> None:
        """The function has returned."""
        if self.registered is None:
            raise self._wrong("returned without run.restore(...)")
        if not isinstance(result, (dict, type(None))):
            raise self._wrong("must return a dict of numbers, or nothing")
        self._end_steps()
        if self._kept is not None:
            self._end_epoch(self._epoch_record(open_too=True))
        with self.whole:
            self.position.finished = True
            if result is not None:
                self.position.metrics = numbers(f"task={self.config.task}: the result", result)

    def _leave(self) -> NoReturn:
        """Out of the function, with everything saved."""
        self._save_last()
        raise Leaving

    def _state(self) -> State:
        if self._kept is not None:
            return self._kept.state
        return self._stored or {} if self.registered is None else self.registered.state()

    def _epoch(self) -> int:
        within = self.position.over or self.position.batches > 0
        return max(1, self.position.epoch + within)

    def _record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        if self.config.train.nonfinite == "fail" and not math.isfinite(measured.get("loss", 0.0)):
            self.restored = False  # what came of that step is nothing to keep
            raise NotFinite(f"step {step + 1}: the loss is not finite; train.nonfinite=skip goes on all the same")
        return {"epoch": self._epoch(), **{name: finite(value) for name, value in measured.items()}}

    def _epoch_record(self, open_too: bool) -> dict[str, Any]:
        return {"epoch": self.position.epoch + 1, "step": self.position.step, **self._log.epoch(open_too)}

    def _check_length(self, length: int) -> None:
        """Raise ConfigError unless all ranks have as many batches: they could not agree on where to stop."""
        lengths = [int(each) for each in self.group.gather(torch.tensor(length, device=self.group.device))]
        if len(set(lengths)) > 1:
            raise self._wrong(
                f"run.validation(...) needs as many batches on every rank, not {lengths}; DistributedSampler gives them"
            )

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"task={self.config.task}: {what}")

    def _seed(self, *parts: int | str) -> None:
        """Whatever draws numbers from now on draws the same in every attempt."""
        seed_generators(seed_of(*parts, self.config.seed, self.rank), self.group.device)

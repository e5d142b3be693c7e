"""The loop around a user's training function: it hands out batches, and leaves the function when the ranks stop.

`Phase`, `Event` and `NEXT` are the order of events. `CustomLoop` follows the function through it: first what the
function calls through `Run`, then what the engine calls, then what happens in between. `CustomState` is what a
checkpoint would hold at each moment; `UserLoaders` and `SideBatches` are where the batches come from.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from laststep import compat, script
from laststep.checkpoint.manager import Position
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.checkpoint.store import OPAQUE
from laststep.config.config import Config, changed_ends
from laststep.config.errors import ConfigError, NotFinite
from laststep.config.keep import Ranking
from laststep.config.reads import GivenKeys
from laststep.data.loader import LoaderFactory, StepLoader, StepNumbers, end_workers, set_up_workers
from laststep.data.order import (
    Order,
    OwnGenerators,
    SampledOrder,
    order_of,
    preserved_generators,
    seed_generators,
    seed_of,
)
from laststep.data.streams import StepStream, Streams
from laststep.loops import loop_rules
from laststep.loops.digest import FingerprintedState, difference_between_ranks
from laststep.loops.engine import AttemptContext, Engine, Loop
from laststep.loops.gradients import rehearse
from laststep.loops.initial_weights import apply_plan, plan_for
from laststep.loops.loop_rules import Modes, StepChecks
from laststep.loops.measured import LoggedValues, as_numbers, finite
from laststep.loops.registered import Registered, State, unwrapped
from laststep.loops.shares import CustomShares
from laststep.loops.snapshot import HostSnapshot
from laststep.ranks.beside import signpost
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace
from laststep.records.media import keep, without_media
from laststep.say import counted


class Phase(Enum):
    """Where the function is."""

    SETUP = "before run.restore(...)"
    READY = "objects are registered; no step in this attempt yet"
    BETWEEN_STEPS = "within run.steps(...)"
    IN_STEP = "in the body of the loop over run.steps(...), before the first update of this step"
    UPDATING = "in the body of that loop, since the first update of this step"
    BROKEN_OFF = "a break or an error left the body before an update; the step is still open"
    BROKEN_OFF_UPDATING = "a break or an error left the body after an update; the step is still open"
    AFTER_STEPS = "the epoch has no more steps: a validation, a schedule"


class Event(Enum):
    """What moves the function from one phase to the next."""

    RESTORE = "run.restore(...) has registered the objects"
    FIRST_BATCH = "run.steps(...) is asked for its first batch, and ends the epoch before"
    BATCH = "run.steps(...) hands out a batch"
    UPDATE = "an optimizer's step() begins"
    STEP_ENDS = "the body of the loop over run.steps(...) is done, or a step that was broken off is closed"
    BROKEN_OFF = "a break or an error leaves the body of that loop"
    STEPS_END = "run.steps(...) is exhausted; after a break: at run.validation(...), run.steps(...) or the return"


# A step that ends without an update (a gradient scaler has skipped it) passes through UPDATING all the same.
NEXT = {
    (Phase.SETUP, Event.RESTORE): Phase.READY,
    (Phase.READY, Event.FIRST_BATCH): Phase.BETWEEN_STEPS,
    (Phase.BETWEEN_STEPS, Event.BATCH): Phase.IN_STEP,
    (Phase.IN_STEP, Event.UPDATE): Phase.UPDATING,
    (Phase.UPDATING, Event.STEP_ENDS): Phase.BETWEEN_STEPS,
    (Phase.IN_STEP, Event.BROKEN_OFF): Phase.BROKEN_OFF,
    (Phase.UPDATING, Event.BROKEN_OFF): Phase.BROKEN_OFF_UPDATING,
    (Phase.BROKEN_OFF, Event.UPDATE): Phase.BROKEN_OFF_UPDATING,
    (Phase.BROKEN_OFF_UPDATING, Event.STEP_ENDS): Phase.BETWEEN_STEPS,
    (Phase.BETWEEN_STEPS, Event.STEPS_END): Phase.AFTER_STEPS,
    (Phase.AFTER_STEPS, Event.FIRST_BATCH): Phase.BETWEEN_STEPS,
}
IN_BODY = {Phase.IN_STEP, Phase.UPDATING}
IN_UPDATE = {Phase.UPDATING, Phase.BROKEN_OFF_UPDATING}  # the state is not whole
STEP_OPEN = {*IN_BODY, *IN_UPDATE, Phase.BROKEN_OFF}
MOST_OWN_BYTES = 64 << 20  # of run.own(...), that are exchanged without a word


@dataclass(frozen=True)
class Framework:
    """A framework that saves and loads its state by itself, in a folder: the two functions of run.checkpoint(...)."""

    save: Callable[[Path], object]
    load: Callable[[Path], object]


class LeaveFunction(SystemExit):
    """The ranks agreed to stop, and everything is saved. Code that must run at an exit runs; nothing prints it."""


class CustomLoop(Loop):
    """Calls a function that has its own training loop, and follows it through its steps, so that its state can be saved
    and rescued. The public methods in the first part are what the function calls, through Run.

    A run can resume at two kinds of places: between two steps, and at the end of an epoch's steps. The state at such an
    end is held until what follows the steps, for example a validation, is done. If an attempt ends before that, the
    next one does all of it again.

    Within a step the state changes from the first update on. Before that, forward and backward passes change only
    buffers, and those are snapshotted.
    """

    def __init__(self, function: Callable[[CustomLoop], Any], context: AttemptContext, given: GivenKeys) -> None:
        self.micro_batch, self.last_micro_batch = 0, 0  # of the open step, from 0
        self.config, self.group, self.given = context.config, context.group, given
        self._given_checked = False  # whether the keys that the user has set are read
        self._changed_ends: list[str] = []  # with which the user has resumed the run
        self.engine = Engine(context, self)
        self.function, self.run_dir = function, context.run
        self.phase = Phase.SETUP
        self._logged = LoggedValues(self.group, Ranking.parse(self.config.checkpoint.best_by).metric)
        self._validations: dict[int, dict[str, Any]] = {}  # lines of validations within a step, by that step (from 1)
        self._state = CustomState(self.group, self.engine.ring.update, self.engine.watch.advance)
        self.generators = OwnGenerators()
        self.shares = CustomShares(self.config, self.group, self._logged, self.generators.seed)
        self._samples = 0  # of the open step, over all ranks
        self._checks: StepChecks  # from run.restore(...) on
        self._warned = False  # of an update before the steps
        self._several_updates = False  # whether a step has made more than one
        self._modes = Modes(self.engine.progress.say)
        self.loaders = UserLoaders(self.group, self.config.task, self.shares.here)
        self.streams = Streams(self.group, self.config.seed, self.shares.total)
        self._has_epochs = False
        self._function_epoch, self._epochs = 0, 1  # the epoch the function is in (from 0), and their number
        self.group.connect_alone()

    # What the function calls

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
        self.engine.startup.done("data and model")
        self.engine.watch.enter("restoring")
        registered = Registered(objects, self.group, self._logged.row, opaque=framework is not None)
        self._state.registered = registered
        self._hold_shard(registered.place)
        self._too_early.remove()
        self._move(Event.RESTORE)
        self.shares.register(registered, averages_gradients or framework is not None)
        rehearses &= self.config.train.rehearsal and self.shares.total is None
        if rehearses and self.engine.size > 2:  # a sum of two is the same in either order
            for module, ddp in registered.parallel:
                rehearse(module, ddp, self.group.device)
        for optimizer in registered.optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)
        if registered.own and self.shares.total is not None:
            raise self._misuse(loop_rules.OWN_WITH_SHARES)
        if (sent := sum(each.bytes for each in registered.own.values())) > MOST_OWN_BYTES:
            self.engine.progress.say(f"run.own(...): {sent / 1e6:.0f} MB of all ranks are sent to each in every step")
        self._checks = StepChecks(registered)
        self._state.restore()
        if self.config.checkpoint.start_from is not None and self._state.checkpoint is None:
            self._start_from(self.config.checkpoint.start_from, registered)
        if framework is not None:
            self._restore_framework(framework)
        self.engine.finish_restore()
        if self.engine.probe is not None:
            self.engine.probe.watch_registered(objects, registered)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, from 0; the first may be half done."""
        self._epochs, self._has_epochs = count, True
        for epoch in range(self.engine.position.epoch, count):
            self._check_still_runs()
            self._function_epoch = epoch
            self._seed("epoch", epoch)
            yield epoch
            self._logged.end_epoch()

    def steps(
        self, loader: StepLoader | StepStream | StepNumbers, count: int | None, accumulate: int = 1
    ) -> Iterator[Any]:
        """The micro-batches, `accumulate` to a step, of the steps that are left of this epoch. It has `count` steps;
        None: once over the data."""
        self._check_still_runs()
        position = self.engine.position
        self._drawn = drawn = MicroBatches(loader, accumulate)
        count = self._begin_steps(drawn, count)
        if not position.over:
            batches = drawn.batches(position.step, count - position.batches)
            in_accelerate = compat.begin_accelerate_steps(self) if accumulate > 1 else None
            try:
                for number in range(position.batches + 1, count + 1):
                    self._check_given()
                    if self.engine.saves.due:
                        self.engine.save()
                    if not self.engine.stop.begin_tick():
                        self._leave()
                    self._checks.begin(position.step)
                    self.micro_batch, self.last_micro_batch = 0, len(drawn.of(position.step)) - 1
                    with signpost.doing("waiting for data"):
                        batch = self.shares.begin_step(position.step, loader, batches)
                    self._samples = drawn.samples(position.step)
                    self._move(Event.BATCH)
                    if accumulate > 1:
                        self._logged.begin_micro_batch()
                    torch.clear_autocast_cache()  # autocast around the loop would keep old weights, and freed graphs
                    if self.engine.probe is not None:
                        self.engine.probe.begin_custom_step(position, batch)
                    yield batch
                    while self.micro_batch < self.last_micro_batch:
                        yield self._next_micro_batch(batches)
                    self.end_step(ends_epoch=number == count)
            except GeneratorExit:  # by a break, whose step `end_steps` closes, or by an error on its way out
                if self.phase is Phase.UPDATING:
                    self._state.break_off()
                raise
            finally:
                if in_accelerate is not None:
                    in_accelerate()
                if self.phase in IN_BODY:
                    self._move(Event.BROKEN_OFF)
        self.end_steps()

    def batches_left(self, loader: StepLoader | StepStream | StepNumbers, count: int | None, accumulate: int) -> int:
        """How many micro-batches `steps` has in the function's epoch, before it has begun."""
        position, drawn = self.engine.position, MicroBatches(loader, accumulate)
        done = position.batches if position.epoch == self._function_epoch else 0
        left = 0 if position.over and done else (len(drawn) if count is None else count) - done
        return drawn.of(position.step + left).start - drawn.of(position.step).start

    def end_step(self, ends_epoch: bool = False) -> None:
        """Close the step in whose body the function is, if it is in one. A framework does that itself, before it asks
        for the next batch: between the two it may wait for the other ranks."""
        if self.phase in IN_BODY:
            self._checks.end(self.engine.position.step)
            self._end_step(ends_epoch)

    def end_steps(self) -> None:
        """The steps of this epoch are over, if it has begun any."""
        if self.phase in (Phase.SETUP, Phase.READY, Phase.AFTER_STEPS):
            return
        if broken_off := self.phase in STEP_OPEN:
            self._end_step(ends_epoch=True)
        self._check_given()
        self._state.end_steps()
        self.engine.position.over = True
        self._move(Event.STEPS_END)
        # After a break the function may have done more than its steps already, and only registered state is held.
        if self.engine.saves.due and (self.engine.rescuable or not broken_off):
            self.engine.save()
        self._seed("after", self.engine.position.epoch)  # after the save, in which a framework may draw random numbers

    def share_batches(self, batch: Any) -> Iterator[Any]:
        """This rank's shares of the batch of the open step, or that batch itself."""
        shares = self.shares.of(batch)
        probe = self.engine.probe if self.shares.total else None
        return shares if probe is None else probe.noting(shares)

    def batches(self, loader: StepLoader, per_step: int) -> SideBatches:
        """The batches of a second loader, `per_step` for each step."""
        if problem := loop_rules.of_batches(loader, per_step, self.shares.total):
            raise self._misuse(problem)

        def unit() -> int | None:
            if self.phase not in IN_BODY:
                return None
            return self.shares.unit(self._drawn.of(self.engine.position.step).start + self.micro_batch)

        return SideBatches(self.loaders.another(loader, self.config.seed), per_step, unit, self.shares.here)

    def validation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader. The ranks can stop before each of them."""
        self._check_still_runs()
        if self.phase in IN_BODY:
            self._logged.begin_validation(self.engine.position.step + (self.phase is Phase.UPDATING))
        else:
            self.end_steps()
        self.loaders.prepare(loader)
        batches, before = iter(loader), signpost.shown
        signpost.show("validation")
        try:
            most = self.engine.probe.validation_batches if self.engine.probe else None
            for number, batch in enumerate(islice(batches, most)):
                # Within a step, or when the state has changed since the epoch's steps, a run could not resume from
                # here. Then the ranks stop at the next place where it can.
                if not self.engine.stop.begin_tick() and self._can_leave_validation():
                    self._leave()
                self._seed("validate", self.engine.position.step, number)
                if self.engine.probe is not None and self.phase not in (Phase.SETUP, Phase.READY):
                    self.engine.probe.begin_validation_batch(self.engine.position.step)  # one that follows a step
                yield batch
        finally:
            signpost.show(before)
            if not getattr(loader, "persistent_workers", False):
                end_workers(batches)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values for the line of the open step, or else of the epoch."""
        is_open = self.phase in STEP_OPEN
        values, shown = without_media(values)
        if shown and self.group.world.rank == 0:
            keep(self.run_dir, max(1, self.engine.position.step + is_open), shown)
        log = self._logged.log_step if is_open else self._logged.log_epoch
        log(values)

    # What the engine calls

    def restore(self, checkpoint: SharedCheckpoint | None) -> None:
        """Take over the position of the checkpoint. The objects take over the rest when the function registers them."""
        if checkpoint is not None:
            self._state.checkpoint = checkpoint
            self.engine.take_position(Position(**checkpoint.position))
            self._modes.resume(self.engine.position)
            if before := checkpoint.manifest.config:
                self._changed_ends = changed_ends(Config.parse(before), self.config)
                self.given.add(self._changed_ends)
            if self.engine.position.finished and self._changed_ends:
                self.engine.position.finished = False
                if self.engine.position.one_epoch:  # which is longer now
                    self.engine.position.reopen_epoch(begins_after=0)

    def train(self) -> bool:
        """Call the function. Raises ConfigError where it breaks a rule of docs/custom-loops.md."""
        if self.engine.position.finished:
            self.engine.finish_restore()
            return True
        self.engine.watch.enter("preparing data")
        # The same on all ranks: a model, or an average of it, that is made before DistributedDataParallel wraps it.
        place = 0 if self.shares.total is None else self.shares.place
        self._draw(seed_of("function", self.config.seed, place))
        self._too_early = register_optimizer_step_pre_hook(self._updates_too_early)
        try:
            result = self._call_function()
        except LeaveFunction:
            return False
        except SystemExit as error:
            if error.code not in (None, 0):
                raise RuntimeError(f"task={self.config.task}: called sys.exit({error.code})") from error
            result = None
        finally:
            self._too_early.remove()
            self.loaders.close()
            self.streams.close()
        if self.engine.saves.last:  # the function has caught LeaveFunction
            return False
        self._finish(result)
        return True

    def before_save(self) -> None:
        """Make the state the same on every rank, and raise ConfigError if it is not. A collective."""
        self._state.sync()
        engine = self.engine
        self.streams.gather()
        engine.position.streams = self.streams.snapshot(engine.position.streams)
        if engine.size == 1 or engine.saves.saved.same_moment(engine.position):
            return
        # Each rank writes a part of the state, so it must be the same on all.
        if difference := difference_between_ranks(self._state.current(), self.group, engine.place.shards):
            engine.spoil()
            raise self._misuse(
                f"the registered state differs between ranks at step {engine.position.step}: {difference}. Every rank "
                "must register the same values: average or broadcast them over the ranks first, or leave out what is "
                "one rank's own"
            )

    def state(self) -> State:
        """What the registered objects have to be when a run resumes here."""
        return self._state.current()

    def digested(self) -> State:
        """The same, without gradient scalers."""
        return self._state.current(scalers=False)

    def hold(self) -> HostSnapshot:
        """The same, as the host has it."""
        return self._state.hold(self.engine.queue.on_host)

    def unchanged(self) -> bool:
        """Also False when what follows the steps of an epoch has changed the state."""
        return self._state.unchanged()

    def epoch(self) -> int:
        """The epoch of the last finished step, from 1; within an epoch, the one under way."""
        within = self.engine.position.over or self.engine.position.batches > 0
        return max(1, self.engine.position.epoch + within)

    def record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        """What the function has logged in this step."""
        if self.config.train.nonfinite == "fail" and not math.isfinite(measured.get("loss", 0.0)):
            self.engine.spoil()
            raise NotFinite(f"step {step + 1}: the loss is not finite; train.nonfinite=skip would ignore that")
        return {"epoch": self.epoch(), **{name: finite(value) for name, value in measured.items()}}

    def lines(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        """Also that of a validation within the step, if there was one."""
        validation = self._validations.pop(line["step"], None)
        return [line] if validation is None else sorted([line, validation], key=lambda each: each["step"])

    def before_request(self) -> None:
        """Give every rank rank 0's logged values."""
        self._logged.sync_steps()

    def epoch_written(self) -> None:
        """What follows the steps of the epoch is done."""
        self._state.end_epoch()

    # The order of events

    def _begin_steps(self, drawn: MicroBatches, count: int | None) -> int:
        """Begin, or continue, the steps of the function's epoch; returns how many the epoch has."""
        position, loader = self.engine.position, drawn.loader
        if problem := loop_rules.of_steps(loader, self.phase is not Phase.SETUP, drawn.each, self.shares.total):
            raise self._misuse(problem)
        if self.phase in IN_BODY and self._function_epoch == position.epoch:
            raise self._misuse(loop_rules.TWICE)
        self.end_steps()
        self._state.registered.exchange_own()
        self._state.snapshot()
        if self.phase is Phase.AFTER_STEPS:
            if self._function_epoch == position.epoch:
                raise self._misuse(loop_rules.TWICE)
            self._end_epoch(include_open=False)
        position.epoch = self._function_epoch
        if isinstance(loader, StepLoader):
            self.loaders.check_order(loader)
        count = len(drawn) if count is None else count
        self._announce(count, drawn.batch_size)
        self._state.restore_for_first_step()
        self._move(Event.FIRST_BATCH)
        return count

    def _next_micro_batch(self, batches: Iterator[Any]) -> Any:
        """The next micro-batch of the open step."""
        self.engine.watch.advance()  # a step of many may take longer than the hang timeout
        with signpost.doing("waiting for data"):
            batch = next(batches)  # first, as loading may draw random numbers
        self.micro_batch += 1
        torch.clear_autocast_cache()
        self.shares.seed(self.engine.position.step, self.micro_batch)
        self._logged.begin_micro_batch()
        return batch if self.engine.probe is None else next(self.engine.probe.noting(iter([batch])))

    def _announce(self, count: int, batch_size: int) -> None:
        """Publish how long the run is, if this epoch and all later ones have `count` steps."""
        step = self.engine.position.step
        total = step - self.engine.position.batches + (self._epochs - self._function_epoch) * count
        if total != self.engine.progress.total_steps:
            self.engine.announce_length(total, batch_size)
        if self.engine.watch.phase != "training":
            self.engine.watch.enter("training")
            begins = "starting" if self._state.checkpoint is None else f"resuming after step {step}"
            ranks = f"{counted(self.engine.size, 'rank')} on {self.group.device.type}"
            self.engine.progress.say(f"{begins}: {counted(total, 'step')}, {count} per epoch, {ranks}")

    def _before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook: an optimiser's step() begins. The optimisers of torch call a closure, which computes the gradients,
        before they change anything: the update begins when it returns. Another optimiser may change the state first."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
            self._before_update()
            return None
        begun = False

        def compute() -> Any:
            nonlocal begun
            loss = closure()
            if not begun:  # LBFGS calls it again during its update
                self._before_update()
            begun = True
            return loss

        return args[:1], {**kwargs, "closure": compute}

    def _before_update(self, *_: Any) -> None:
        """An optimiser is about to change the state: until the end of the step it is not consistent."""
        if self.phase not in STEP_OPEN:
            if self.phase is Phase.READY and not self._warned:
                self._warned = True
                self.engine.progress.say(loop_rules.UPDATE_BEFORE_STEPS)
            return
        registered = self._state.registered
        if self.micro_batch < self.last_micro_batch and self.phase in IN_BODY:
            number, total = self.micro_batch + 1, self.last_micro_batch + 1
            raise self._misuse(loop_rules.UPDATE_WITHIN.format(number, total, self._drawn.each))
        self.shares.check_complete()
        if begins := self.phase not in IN_UPDATE:
            self._logged.average_micro_batches()
            if registered.optimizers:
                self._logged.log_learning_rate(registered.optimizers[0].param_groups[0]["lr"])
        registered.sync_buffers()  # before the update begins: it waits for ranks that may be dead
        if begins:
            registered.exchange_own()  # likewise
            self._modes.update_begins(registered.modules)
            self.engine.begin_update()
            self._move(Event.UPDATE)
        else:
            self._several_updates = True
        registered.buffers.commit()

    def _end_step(self, ends_epoch: bool) -> None:
        """Close the open step."""
        registered = self._state.registered
        if self.phase not in IN_UPDATE:  # for example, a gradient scaler has skipped the update
            self._checks.no_update(self.engine.position.step)
            self._before_update()
        if name := registered.changed_own():
            raise self._misuse(loop_rules.OWN_TOO_LATE.format(name))
        registered.snapshot()
        validation = self._take_validation()
        streams = self.streams.snapshot(self.engine.position.streams)
        logged = self._logged.end_step()
        if self._several_updates:
            self._logged.sync_steps()  # a rank that saves its copy must know what rank 0 has logged after the update
            self.engine.keep_own_copies()
        modes = self._modes.fingerprint
        self.engine.end_update(logged, self._samples, batches=1, modes=modes, streams=streams)
        self._move(Event.STEP_ENDS)
        # What was logged after the update is known to the others before rank 0 can die in the next step.
        self._logged.sync_steps()
        self.streams.exchange(self.engine.position.step)
        self.engine.step_done(self._samples, ends_epoch)
        if validation is not None:
            self._validation_done(validation)

    def _take_validation(self) -> dict[str, Any] | None:
        """The line of the validation within the open step, if there was one. It is written with the step's own line: no
        step is rescued without it."""
        values, position = self._logged.end_validation(), self.engine.position
        if values is None:
            return None
        line = self._validations[position.step + 1] = {"epoch": position.epoch + 1, **values}
        if line["step"] > position.step:
            position.metrics, position.measured = line, line["step"]
        return line

    def _validation_done(self, line: dict[str, Any]) -> None:
        """Write the line now, and save if these are the best weights. A collective."""
        self.engine.flush()
        self.engine.metrics.append([], self.engine.progress.of_epoch(line))
        if line["step"] == self.engine.position.step:
            best = self.engine.rank == 0 and self.engine.saves.would_be_best(line)
            self.engine.saves.due |= self.group.broadcast_bool(best)

    def _check_given(self) -> None:
        """After the first step of this attempt: raise ConfigError for a key that was set and that nothing reads."""
        if not self._given_checked and self.engine.position.step >= self.engine.first_step:
            self._given_checked = True
            self.engine.check_given(self.given)

    def _end_epoch(self, include_open: bool) -> None:
        values, position = self._logged.epoch_values(include_open), self.engine.position
        self._state.registered.meet()
        self.engine.end_epoch({"epoch": position.epoch + 1, "step": position.step, **values})
        if position.epoch == 1:
            for line in self.given.late():
                self.engine.progress.say(line)

    def _finish(self, result: Any) -> None:
        """The function has returned."""
        trained = self.phase is not Phase.READY or self.engine.position.step > 0
        if problem := loop_rules.of_return(result, self.phase is not Phase.SETUP, trained):
            raise self._misuse(problem)
        self.end_steps()
        if self.phase is Phase.AFTER_STEPS:
            self._end_epoch(include_open=True)
        elif self._changed_ends:  # the run was to be longer, and no step was left
            self.engine.check_given(self.given, self._changed_ends)
        with self.engine.records_lock:
            self.engine.position.finished, self.engine.position.one_epoch = True, not self._has_epochs
            if result is not None:
                self.engine.position.metrics = as_numbers(f"task={self.config.task}: the result", result)

    def _can_leave_validation(self) -> bool:
        """Whether a run could resume from here. The answer is the same on every rank; may wait for a save."""
        if not self._state.steps_over or not self._state.unchanged_everywhere():
            return False
        if self.engine.rescuable:
            return True
        self.engine.saves.wait()  # nobody knows whether the framework's state is still that of the steps
        return self.engine.saves.saved.same_moment(self.engine.position)

    def _restore_framework(self, framework: Framework) -> None:
        """Have the framework load what it has saved, if it has, and save from now on."""
        if self._state.checkpoint is not None:
            self.engine.watch.enter("starting")  # there is no telling how long it takes
            framework.load(self.engine.store.path(self.engine.position.step).absolute() / OPAQUE)
            self.engine.watch.enter("restoring")
        self.engine.saves.add_opaque(framework.save)
        self.engine.rescuable = False
        self.engine.progress.say(
            "run.checkpoint(...): only all ranks together can save this state; a rank that dies costs the steps since "
            "the newest checkpoint"
        )

    def _updates_too_early(self, *_: Any) -> None:
        raise self._misuse(loop_rules.UPDATE_TOO_EARLY)

    def _leave(self) -> NoReturn:
        """Save everything, and leave the function."""
        self.engine.save_last()
        raise LeaveFunction

    def _check_still_runs(self) -> None:
        """Raise LeaveFunction again if the function has caught it."""
        if self.engine.saves.last:
            raise LeaveFunction

    def _move(self, event: Event) -> None:
        self.phase = NEXT[self.phase, event]

    def _misuse(self, what: str) -> ConfigError:
        words = self.config.script
        return ConfigError(f"{script.name_of(words) if words else f'task={self.config.task}'}: {what}")

    def _seed(self, *parts: int | str) -> None:
        """Seed all generators: from here on, every attempt draws the same random numbers."""
        self._draw(seed_of(*parts, self.config.seed, self.shares.place))

    def _draw(self, seed: int) -> None:
        """Seed all generators, also those of run.generator(...)."""
        seed_generators(seed, self.group.device)
        self.generators.seed(seed)

    def _start_from(self, source: str, registered: Registered) -> None:
        """Begin with what another tool has saved. A collective. Raises ConfigError."""
        objects = registered.objects.items()
        modules = {name: unwrapped(each) for name, each in objects if isinstance(each, nn.Module)}
        optimizers = {name: each for name, each in objects if isinstance(each, Optimizer)}
        record, say = self.run_dir.initial_weights, self.engine.progress.say
        apply_plan(plan_for(source, modules, optimizers, self.group, record, say), modules, optimizers, self.group)
        registered.snapshot()

    def _hold_shard(self, place: ShardPlace) -> None:
        """From now on this rank saves this shard of the state. Warns if the steps of the checkpoint were computed in
        another way."""
        self.engine.hold_shard(place)
        if place.shards > 1:
            self.engine.numerics["sharding"] = "full" if place.replicas == 1 else "hybrid"
        if self._state.checkpoint is not None:
            self.engine.compare_numerics(self._state.checkpoint)

    def _call_function(self) -> Any:  # the probe looks at the stack above this
        return self.function(self)


class CustomState:
    """What a checkpoint of a custom training loop holds.

    Until the function has registered its objects, that is nothing. From then on it is the state of these objects at the
    end of the last step. When an epoch has no more steps, it stays the state that these steps have left, until
    everything that follows them in the epoch is done: a resumed run does all of that again.
    """

    registered: Registered  # once the function has registered its objects

    def __init__(
        self, group: Group, update: Callable[[], AbstractContextManager[None]], advance: Callable[[], None]
    ) -> None:
        """The state changes within `update`, see `Ring`; `advance` is called while a checkpoint is loaded."""
        self._group, self._update, self._advance = group, update, advance
        self.checkpoint: SharedCheckpoint | None = None  # until the first step
        self._after_steps: FingerprintedState | None = None  # at the end of the epoch's steps
        self._at_break: FingerprintedState | None = None  # the same, where a break has ended them

    def restore(self) -> None:
        """Load the checkpoint into the registered objects, if there is one. A collective. Raises ConfigError."""
        if self.checkpoint is not None:
            self.registered.restore(self.checkpoint, self._advance, last=False)

    def restore_for_first_step(self) -> None:
        """Load the checkpoint again: it already holds every change that the function makes before its first step. A
        collective."""
        if self.checkpoint is not None:
            with self._update():
                self.registered.restore(self.checkpoint, self._advance, last=True)
            self.checkpoint = None

    def current(self, scalers: bool = True) -> State:
        """The state for a checkpoint. References. A gradient scaler, when asked for its state, waits for the device."""
        if self._after_steps is not None:
            return self._after_steps.state
        return self.registered.state(scalers) if hasattr(self, "registered") else {}

    @property
    def steps_over(self) -> bool:
        """Whether this is the state that the steps of an epoch have left."""
        return self._after_steps is not None

    def unchanged(self) -> bool:
        """Whether what follows the steps of an epoch has left the state alone. True when no epoch's steps are over."""
        return self._after_steps is None or self._after_steps.unchanged()

    def unchanged_everywhere(self) -> bool:
        """The same, on every rank: of a sharded state, what has changed may be another rank's rows. A collective."""
        unchanged = self.unchanged()
        if self.registered.place.shards == 1:
            return unchanged
        return all(map(bool, self._group.gather(torch.tensor(unchanged, device=self._group.device))))

    def hold(self, on_host: Callable[[Tensor], bool]) -> HostSnapshot:
        """What the host holds of the state now, see `HostSnapshot`."""
        return self._after_steps or self.registered.hold(on_host)

    def snapshot(self) -> None:
        """Take over what the function has changed since the last epoch's steps."""
        with self._update():
            self.registered.snapshot()

    def sync(self) -> None:
        """Make the state the same on every rank, for a save between two steps: a forward pass after the update has made
        the buffers differ. A collective."""
        if hasattr(self, "registered") and self._after_steps is None:
            self.registered.sync_buffers()
            self.registered.exchange_own()
            with self._update():
                self.registered.buffers.commit()
                self.registered.snapshot()

    def break_off(self) -> None:
        """A break has left the loop over steps after the update of a step: hold the state as it is now."""
        self.registered.snapshot()
        self._at_break = FingerprintedState(self.registered.state())

    def end_steps(self) -> None:
        """The epoch has no more steps: hold the state that they have left. A collective, except after `break_off`."""
        if self._at_break is None:
            self.sync()
        with self._update():
            self._after_steps = self._at_break or FingerprintedState(self.registered.state())
            self._at_break = None

    def end_epoch(self) -> None:
        """What follows the steps is done too: the state of the registered objects counts again."""
        self._after_steps = None


@dataclass(frozen=True)
class MicroBatches:
    """The batches of a loader, `each` to a step: which ones follows from its number alone. The last step of an epoch of
    the data has those that are left."""

    loader: StepLoader | StepStream | StepNumbers
    each: int

    def __len__(self) -> int:
        """Steps in an epoch of the data."""
        return -(-len(self.loader) // self.each) if isinstance(self.loader, StepLoader) else len(self.loader)

    @property
    def batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.loader.batch_size * (1 if isinstance(self.loader, StepNumbers) else self.each)

    def of(self, step: int) -> range:
        """The numbers of the micro-batches of `step` (from 0), counted over all epochs."""
        if self.each == 1 or not isinstance(self.loader, StepLoader):
            return range(step * self.each, (step + 1) * self.each)
        epoch, number = divmod(step, len(self))
        first, end = epoch * len(self.loader) + number * self.each, (epoch + 1) * len(self.loader)
        return range(first, min(first + self.each, end))

    def samples(self, step: int) -> int:
        """The samples of `step` over all ranks."""
        if isinstance(self.loader, StepNumbers):
            return self.loader.samples(step)
        return sum(self.loader.samples(number) for number in self.of(step))

    def batches(self, first: int, steps: int) -> Iterator[Any]:
        """The micro-batches of `steps` steps, the first of which is step `first`."""
        if isinstance(self.loader, StepNumbers):
            return (step for step in self.loader.batches(first, steps) for _ in range(self.each))
        start = self.of(first).start
        return self.loader.batches(start, self.of(first + steps).start - start)


class UserLoaders:
    """Remembers the loaders that a function has used, so that their worker processes end with the attempt."""

    def __init__(self, group: Group, task: str, shares: int) -> None:
        """`task` is the function's name, for error messages; `shares` is how many shares of a step a rank has."""
        self._group, self._shares = group, shares
        self._task = task
        self._loaders: list[StepLoader | DataLoader[Any]] = []
        self._side_loaders = 0
        self._checked: list[StepLoader] = []

    def make(
        self, loading: LoaderFactory, dataset: Any, seed: int, batch_size: int, sampler: Any, drop_last: bool
    ) -> StepLoader:
        """What run.loader(...) gives. Raises ConfigError."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"run.loader(): a {type(dataset).__name__} has no length or no __getitem__, so it cannot start in the "
                "middle; write `for batch in run.steps(run.stream(data, batch_size), count=N)`"
            )
        if not len(dataset):
            raise ConfigError("run.loader(): the data set is empty")
        samples = len(dataset)
        order = Order(samples, batch_size, seed, drop_last)
        if sampler is not None:
            order = order_of(sampler, samples, batch_size, seed, drop_last)
        if not order.steps_per_epoch:
            raise ConfigError(
                f"run.loader(batch_size={batch_size}, drop_last=True): there are only {order.samples} samples"
            )
        if loading.workers:  # they read settings where nobody sees it: looking at one's attributes reads all of it
            list(loop_rules.within(dataset, set()))
        world = self._group.world
        loader = StepLoader(loading, dataset, order, world.rank, world.size, self._shares)
        self._loaders.append(loader)
        return loader

    def another(self, loader: StepLoader, seed: int) -> StepLoader:
        """A loader of the same samples in an order of its own, for run.batches(...). A collective. Raises
        ConfigError."""
        self._side_loaders += 1
        own = loader.reseeded(seed_of("batches", seed, self._side_loaders))
        self.check_order(own)
        self._loaders.append(own)
        return own

    def check_order(self, loader: StepLoader) -> None:
        """Raise ConfigError if ranks have different orders of samples. A collective, at the first use of a sampler."""
        if not isinstance(loader.order, SampledOrder) or loader in self._checked:
            return
        self._checked.append(loader)
        digest = hashlib.blake2b(loader.order.indices(0).tobytes(), digest_size=7).digest()
        mine = torch.tensor(int.from_bytes(digest, "little"), device=self._group.device)
        if len({int(each) for each in self._group.gather(mine)}) > 1:
            raise ConfigError(
                f"task={self._task}: run.loader(sampler=...): its order differs between ranks; it must be that of the "
                "global batches, of which run.loader(...) gives each rank its share"
            )

    def prepare(self, loader: Any) -> None:
        """Check and remember a DataLoader at its first use; its workers shall leave stop signals to the rank. Raises
        ConfigError."""
        if isinstance(loader, DataLoader) and loader not in self._loaders:
            self._check_length(len(loader))
            set_up_workers(loader)
            self._loaders.append(loader)

    def close(self) -> None:
        """End all worker processes."""
        for loader in self._loaders:
            if isinstance(loader, StepLoader):
                loader.close()
            else:
                end_workers(compat.kept_iterator(loader))

    def _check_length(self, length: int) -> None:
        """Raise ConfigError unless all ranks have the same number of batches: they could not agree on where to stop."""
        lengths = [int(each) for each in self._group.gather(torch.tensor(length, device=self._group.device))]
        if len(set(lengths)) > 1:
            raise ConfigError(
                f"task={self._task}: run.validation(...) needs as many batches on every rank, not {lengths}; "
                "DistributedSampler gives them"
            )


class SideBatches(Iterator[Any]):
    """`per_step` batches for each iteration of the steps, a micro-batch: which ones follows from its number alone,
    over all epochs. It may leave some out. With train.shares it is a batch for each share."""

    def __init__(self, loader: StepLoader, per_step: int, open_step: Callable[[], int | None], shares: int = 1) -> None:
        """`open_step()` is the micro-batch (from 0) that is open, None between steps. Of several `shares`, each counts
        as one: the loader gives them one after another."""
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

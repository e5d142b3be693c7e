"""The steps of a custom training loop: when each begins and ends, and what a checkpoint holds meanwhile.

`Phase` and `NEXT` show the order of events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from laststep.checkpoint.manager import Position
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.checkpoint.store import OPAQUE
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.ranking import Ranking
from laststep.data.order import seed_generators, seed_of
from laststep.loops import misuse
from laststep.loops.custom_shares import CustomShares
from laststep.loops.custom_state import CustomState
from laststep.loops.held import HeldState
from laststep.loops.logged import LoggedValues
from laststep.loops.loop import AttemptContext, Loop, finite
from laststep.loops.modes import Modes
from laststep.loops.registered import State
from laststep.loops.rescued import NotFinite
from laststep.loops.same_state import difference_between_ranks
from laststep.loops.turn_checks import TurnChecks


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


@dataclass(frozen=True)
class Framework:
    """A framework that saves and loads its state by itself, in a folder: the two functions of run.checkpoint(...)."""

    save: Callable[[Path], object]
    load: Callable[[Path], object]


class CustomSteps(Loop):
    """Follows a function through its steps, so that its state can be saved and rescued.

    A run can resume at two kinds of places: between two steps, and at the end of an epoch's steps. The state at such an
    end is held until what follows the steps, for example a validation, is done. If an attempt ends before that, the
    next one does all of it again.

    Within a step the state changes from the first update on. Before that, forward and backward passes change only
    buffers, and those are snapshotted.
    """

    def __init__(self, context: AttemptContext) -> None:
        super().__init__(context)
        self.phase = Phase.SETUP
        self._logged = LoggedValues(self.group, Ranking.parse(self.config.checkpoint.best_by).metric)
        self._validations: dict[int, dict[str, Any]] = {}  # lines of validations within a step, by that step (from 1)
        self._held = CustomState(self.group, self._logged.row, self.ring.update, self.watch.advance)
        self.shares = CustomShares(self.config, self.group, self._logged)
        self._samples = 0  # of the open step, over all ranks
        self._checks: TurnChecks  # from run.restore(...) on
        self._warned = False  # of an update before the steps
        self._modes = Modes(self.progress.say)

    def restore(self, checkpoint: SharedCheckpoint | None) -> None:
        """Take over the position of the checkpoint. The objects take over the rest when the function registers them."""
        if checkpoint is not None:
            self._held.checkpoint = checkpoint
            self._position = Position(**checkpoint.position)
            self._modes.resume(self.position)
            if self.position.finished and _is_extended(checkpoint.manifest.config, self.config):
                self.position.finished = False

    def save(self) -> None:
        """Start a save of this position. A collective."""
        self._held.sync()
        compares = self.size > 1 and not self.saves.saved.same_place(self.position)  # each rank writes a part
        if compares and (difference := difference_between_ranks(self._held.current(), self.group, self.place.shards)):
            self.restored = False  # the state of no rank is worth a checkpoint
            raise self._misuse(misuse.of_state(self.position.step, difference))
        super().save()

    def _unchanged(self) -> bool:
        """Also False when what follows the steps of an epoch has changed the state. Of no interest where it cannot be
        saved anyway."""
        if not self.rescuable:
            return True
        return super()._unchanged() and (self.ring.held is not None or self._held.unchanged())

    def _can_leave_validation(self) -> bool:
        """Whether a run could resume from here. The answer is the same on every rank; may wait for a save."""
        if not self._held.steps_over or not self._held.unchanged_everywhere():
            return False
        if self.rescuable:
            return True
        self.saves.wait()  # nobody knows whether the framework's state is still that of the steps
        return self.saves.saved.same_place(self.position)

    def _restore_framework(self, framework: Framework) -> None:
        """Have the framework load what it has saved, if it has, and save from now on."""
        if self._held.checkpoint is not None:
            self.watch.enter("starting")  # there is no telling how long it takes
            framework.load(self.store.path(self.position.step).absolute() / OPAQUE)
            self.watch.enter("restoring")
        self.saves.add_opaque(framework.save)
        self.rescuable = False
        self.progress.say(
            "run.checkpoint(...): only all ranks together can save this state; a rank that dies costs the steps since "
            "the newest checkpoint"
        )

    def _move(self, event: Event) -> None:
        self.phase = NEXT[self.phase, event]

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
                self.progress.say(misuse.UPDATE_BEFORE_STEPS)
            return
        registered = self._held.registered
        assert registered is not None
        self.shares.check_complete()
        if self.phase not in IN_UPDATE and registered.optimizers:
            self._logged.log_learning_rate(registered.optimizers[0].param_groups[0]["lr"])
        registered.sync_buffers()  # before the update begins: it waits for ranks that may be dead
        if self.phase not in IN_UPDATE:
            self._modes.update_begins(registered.modules)
            self.ring.begin_update()
            self._move(Event.UPDATE)
        registered.apply_synced()

    def _end_step(self, ends_epoch: bool) -> None:
        """Close the open step."""
        registered = self._held.registered
        assert registered is not None and self.phase in STEP_OPEN
        if self.phase not in IN_UPDATE:  # for example, a gradient scaler has skipped the update
            self._checks.no_update(self.position.step)
            self._before_update()
        registered.snapshot()
        self._position.modes = self._modes.fingerprint
        validation = self._take_validation()
        self._end_update(self._logged.end_step(), self._samples, batches=1)
        self._move(Event.STEP_ENDS)
        self._step_done(self._samples, ends_epoch)
        if validation is not None:
            self._validation_done(validation)

    def _take_validation(self) -> dict[str, Any] | None:
        """The line of the validation within the open step, if there was one. It is written with the step's own line: no
        step is rescued without it."""
        values, position = self._logged.end_validation(), self.position
        if values is None:
            return None
        line = self._validations[position.step + 1] = {"epoch": position.epoch + 1, **values}
        if line["step"] > position.step:
            position.metrics, position.measured = line, line["step"]
        return line

    def _validation_done(self, line: dict[str, Any]) -> None:
        """Write the line now, and save if these are the best weights. A collective."""
        self.flush()
        self.progress.print_epoch(line)
        if line["step"] == self.position.step:
            best = self.rank == 0 and self.saves.would_be_best(line)
            self.saves.due |= self.group.broadcast_bool(best)

    def _with_validation(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        validation = self._validations.pop(record["step"], None)
        return [record] if validation is None else sorted([record, validation], key=lambda line: line["step"])

    def end_steps(self) -> None:
        """The steps of this epoch are over, if it has begun any."""
        if self.phase in (Phase.SETUP, Phase.READY, Phase.AFTER_STEPS):
            return
        if broken_off := self.phase in STEP_OPEN:
            self._end_step(ends_epoch=True)
        self._held.end_steps()
        self.position.over = True
        self._move(Event.STEPS_END)
        # After a break the function may have done more than its steps already, and only registered state is held.
        if self.saves.due and (self.rescuable or not broken_off):
            self.save()
        self._seed("after", self.position.epoch)  # after the save, in which a framework may draw random numbers

    def _write_epoch(self, record: dict[str, Any]) -> None:
        earlier = self.position.metrics if self.position.measured == self.position.step else {}
        super()._write_epoch(record)
        self.position.metrics = {**earlier, **record}
        self._held.end_epoch()

    def _sync_measured(self) -> None:
        self._logged.sync_steps()

    def _state(self) -> State:
        return self._held.current()

    def _hold(self) -> HeldState:
        return self._held.hold(self.queue.on_host)

    def _epoch(self) -> int:
        within = self.position.over or self.position.batches > 0
        return max(1, self.position.epoch + within)

    def _record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        if self.config.train.nonfinite == "fail" and not math.isfinite(measured.get("loss", 0.0)):
            self.restored = False  # the state since that step is not worth a checkpoint
            raise NotFinite(f"step {step + 1}: the loss is not finite; train.nonfinite=skip would ignore that")
        return {"epoch": self._epoch(), **{name: finite(value) for name, value in measured.items()}}

    def _epoch_record(self, include_open: bool) -> dict[str, Any]:
        values = self._logged.epoch_values(include_open)
        self._held.meet()
        return {"epoch": self.position.epoch + 1, "step": self.position.step, **values}

    def _misuse(self, what: str) -> ConfigError:
        return ConfigError(f"task={self.config.task}: {what}")

    def _seed(self, *parts: int | str) -> None:
        """Seed all generators: from here on, every attempt draws the same random numbers."""
        seed_generators(seed_of(*parts, self.config.seed, self.shares.place), self.group.device)


def _is_extended(before: str, now: Config) -> bool:
    """Whether the run ended elsewhere by the configuration with which its checkpoint was saved, in YAML."""
    if not before:
        return False
    then = Config.parse(before).train
    return (then.epochs, then.max_steps) != (now.train.epochs, now.train.max_steps)

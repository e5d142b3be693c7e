"""The training loop of one attempt: from the newest checkpoint to the end of the run, or to a stop."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from trainer.config import Config, ConfigError, check_batch
from trainer.data.loader import Loading, TrainBatches, ValidationBatches, close_loader
from trainer.data.order import Order
from trainer.learner import Learner, learning_rate
from trainer.observe.metrics import MetricsFile
from trainer.observe.phases import Phases
from trainer.observe.progress import Progress
from trainer.observe.tensorboard import TensorBoard
from trainer.position import Position
from trainer.rundir import RunDir
from trainer.saves import RETRY_LAST_S, Saves
from trainer.state.pack import load
from trainer.state.saver import About, save_alone
from trainer.state.store import CheckpointStore
from trainer.task import load_task
from trainer.world.detect import World
from trainer.world.device import set_up_device
from trainer.world.meet import Group, meet
from trainer.world.signals import Signals
from trainer.world.stop import Stop
from trainer.world.watch import Fault, Watch


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite, and train.nonfinite says that the run is to fail of it."""


class Loop:
    """Trains. Every rank runs one, in step with the others.

    Between two updates the state is whole, and the same on every rank. `whole` is held while it changes: who takes it
    and keeps it, in another thread, has the state of the last whole step for good.
    """

    def __init__(
        self, config: Config, run: RunDir, group: Group, signals: Signals, watch: Watch, phases: Phases
    ) -> None:
        self.config = config
        self.phases = phases
        self.group = group
        self.watch = watch
        self.rank, self.size = group.world.rank, group.world.size
        check_batch(config.train.batch_size, [self.size], config.train.accumulate)
        self.stop = Stop(group.world, group.store, signals, lambda why: watch.report(Fault("failed", why, cause=False)))

        watch.enter("preparing data")
        task = load_task(config)
        group.node_by_node(task.prepare)
        self.train_set, val_set = task.datasets()
        counts = [len(dataset) for dataset in (self.train_set, val_set)]  # type: ignore[arg-type]
        if not all(counts):
            raise ConfigError(
                f"data.name={config.data.name}: empty ({counts[0]} training, {counts[1]} validation samples)"
            )
        self.order = Order(counts[0], config.train.batch_size, config.seed)
        self.total_steps = config.train.epochs * self.order.steps_per_epoch
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)

        if self.rank == 0:
            plan = {"total_steps": self.total_steps, "batch_size": config.train.batch_size}
            with contextlib.suppress(OSError):  # who asks for the run's status will see less
                run.plan.write_text(json.dumps(plan) + "\n")

        self.learner = Learner(config, task, group, self.total_steps)
        pin, timeout_s = group.device.type == "cuda", config.launch.hang_timeout_s
        self.loading = Loading(task.collate, config.data.workers, pin, timeout_s)
        self.validation = ValidationBatches(counts[1], config.train.batch_size, self.rank, self.size)
        self.validation_loader = self.loading.loader(val_set, config.seed, self.validation)

        self.store = CheckpointStore(run.checkpoints)
        self.metrics = MetricsFile(run.metrics, writes=self.rank == 0)
        self.progress = Progress(self.rank == 0, self.total_steps)
        self.tensorboard = TensorBoard(run, config.train.log_every, writes=self.rank == 0)
        stopping = lambda: self.stop.signal is not None  # noqa: E731
        self.saves = Saves(config.checkpoint, self.store, group, self.metrics, self.progress, watch, stopping)
        self.position = Position()
        self.whole = threading.Lock()
        self.restored = False
        self.pending: list[tuple[int, Tensor, Tensor]] = []  # (step, loss, good), not yet in metrics.jsonl
        watch.ticks, watch.busy = lambda: self.stop.tick, lambda: self.learner.busy_s
        phases.done("data and model")

    def restore(self, step: int | None) -> None:
        """Put in the checkpoint of `step`, or the initial state when there is none."""
        train = self.config.train
        state = copy.deepcopy(self.learner.state_dict())
        self.watch.enter("warming up")
        micro_batch = train.batch_size // (self.size * train.accumulate)
        self.learner.warm_up(self.loading.warm_up_batch(self.train_set, self.config.seed, micro_batch))
        self.phases.done("warm-up")
        self.watch.enter("restoring")
        if step is not None:
            state = load(self.store.path(step), self.store.manifest(step))
            self.position = Position(**state["position"])
        self.learner.load_state_dict(state)
        self.saves.saved = copy.copy(self.position)
        self.metrics.rewind(self.position.records)
        self.restored = True
        self.phases.done("restore")
        self.progress.say(
            f"{'starting' if step is None else f'resuming after step {step}'}: {self.total_steps} steps, "
            f"{self.order.steps_per_epoch} per epoch, {self.size} ranks on {self.group.device.type}"
        )

    def run(self) -> bool:
        """Train and save. True when the run is finished, False when the ranks agreed to stop."""
        # See Trainer.__call__. What there is by now is there to stay, and is never walked over again.
        gc.freeze()
        gc.enable()
        self.watch.enter("training")
        batches = iter(self.loading.loader(self.train_set, self.config.seed, self._plan()))
        finished = False
        try:
            finished = self._train(batches)
        finally:
            close_loader(batches)
            close_loader(getattr(self.validation_loader, "_iterator", None) or iter(()))
            if not finished:
                self.tensorboard.end()
        self._save_last()
        return finished

    def close(self) -> None:
        """Every rank is past its last unit of work, and every save has ended."""
        self.stop.close()
        self.saves.close()

    def save(self) -> None:
        """Begin to save this position, see `Saves.begin`. All ranks call it together."""
        self.flush()
        self.position.records = self.metrics.count
        self.saves.begin(self.position, self._about(), self._state())
        self.progress.restart_clock()

    def freeze(self, timeout_s: float = 10.0) -> bool:
        """Keep the state as it is from now on, and enter the steps that it has in the metrics. For another thread than
        the one that trains. False when there is no whole state."""
        if not (self.whole.acquire(timeout=timeout_s) and self.restored):
            return False
        try:
            with self.learner.beside():
                self._enter(self._values())
        except (NotFinite, TimeoutError):
            return False
        return True

    def save_alone(self, tag: str) -> None:
        """Save a frozen state without the other ranks. Raises CheckpointError."""
        self.position.records = self.metrics.count
        with self.learner.beside():
            save_alone(self.store, self._about(), self._state(), self.size, self.metrics.take_over, tag)

    def flush(self) -> None:
        """Enter the finished steps in metrics.jsonl. Until then their losses stay on the device, so that a step waits
        for nothing. Raises NotFinite."""
        values = self._values()
        with self.whole:
            self._enter(values)
        self.saves.note()
        self.progress.restart_clock()

    def _about(self) -> About:
        position = self.position
        epoch = self.order.epoch(max(position.step - 1, 0)) + 1
        measured = {name: value for name, value in position.metrics.items() if value is not None}
        return About(position.step, epoch, position.samples, measured if position.validated == position.step else {})

    def _state(self) -> dict[str, Any]:
        return {"position": asdict(self.position), **self.learner.state_dict()}

    def _save_last(self) -> None:
        """The save at a stop or at the end, which the ranks wait for."""
        self.watch.enter("saving")
        self.saves.last = True
        self.save()
        self.saves.wait()
        while not self.saves.saved.same_place(self.position):
            time.sleep(RETRY_LAST_S)
            self.save()
            self.saves.wait()

    def _values(self) -> list[list[float]]:
        """Loss and whether it was good, of each pending step: here the CPU waits for the device."""
        if not self.pending:
            return []
        return torch.stack([torch.stack([loss.double(), good.double()]) for _, loss, good in self.pending]).tolist()

    def _enter(self, values: list[list[float]]) -> None:
        """Enter the pending steps, given their values, in metrics.jsonl and in the epoch's sums."""
        position, records = self.position, []
        for (step, _, _), (loss, good) in zip(self.pending, values):
            samples = self.order.count(step)
            record: dict[str, Any] = {
                "step": step + 1,
                "epoch": self.order.epoch(step) + 1,
                "loss": _finite(loss),
                "lr": learning_rate(self.config.optim, step, self.total_steps),
                "samples_per_s": round(self.progress.throughput(), 1),
                "time": time.time(),
            }
            if good:
                position.loss_sum += loss * samples
                position.loss_samples += samples
            else:
                self._not_finite(step + 1, loss)
                record["skipped"] = True
            records.append(record)
        self.pending.clear()
        if records:
            self.metrics.append(records)
            last = records[-1]
            self.progress.step(last["step"], last["epoch"], last["loss"], last["lr"], self.config.train.batch_size)

    def _not_finite(self, step: int, loss: float) -> None:
        what = f"step {step}: the {'gradient' if math.isfinite(loss) else 'loss'} is not finite"
        if self.config.train.nonfinite == "fail":
            self.restored = False  # what came after that step is nothing to keep
            raise NotFinite(f"{what}; train.nonfinite=skip would leave such steps out")
        self.position.skipped += 1
        self.progress.say(f"WARNING: {what}, its update was left out ({self.position.skipped} so far)")

    def _train(self, batches: Iterator[Any]) -> bool:
        first = self.position.step + 1
        while True:
            if self._validation_due() and not self._validate():
                return False
            if self.saves.due:
                self.save()
            if self.position.step == self.total_steps:
                return True
            if not self.stop.begin_tick():
                return False
            self._train_step(batches)
            if self.position.step == first:
                self.phases.done("first step")
                self.progress.say(f"first step after {self.phases}")
                self.tensorboard.start()

    def _train_step(self, batches: Iterator[Any]) -> None:
        position, step = self.position, self.position.step
        began = time.perf_counter()
        counts = self.order.share_counts(step, self.rank, self.size, self.config.train.accumulate)
        micro_batches = [(next(batches), count) for count in counts]
        self.learner.busy_s += time.perf_counter() - began
        samples = self.order.count(step)
        self.learner.learn(step, micro_batches, samples)
        with self.whole:
            self.pending.append((step, *self.learner.update()))
            position.step += 1
            position.samples += samples
        self.progress.count(samples)
        every = self.config.checkpoint.every_steps
        self.saves.due |= every is not None and position.step % every == 0
        if position.step % self.config.train.log_every == 0 or self._validation_due():
            self.flush()
            # The ranks' clocks differ, so rank 0's decides.
            self.saves.due |= self.group.rank_0_says(self.saves.due_by_clock())

    def _validation_due(self) -> bool:
        step = self.position.step
        ends_epoch = step > 0 and (step % self.order.steps_per_epoch == 0 or step == self.total_steps)
        return ends_epoch and self.position.validated != step

    def _validate(self) -> bool:
        """Measure the model and end the epoch. False when the ranks agreed to stop: a resumed run measures anew."""
        position = self.position
        self.learner.train(False)
        sums = torch.zeros(len(self.learner.names), dtype=torch.float64, device=self.group.device)
        for number, batch in enumerate(self.validation_loader):
            if not self.stop.begin_tick():
                return False
            sums += self.learner.evaluate(position.step, number, batch, len(self.validation.share(number)))
        self.learner.train(True)

        epoch = self.order.epoch(position.step - 1) + 1
        means = [total / self.validation.samples for total in self.group.sum(sums).tolist()]
        train_loss = position.loss_sum / position.loss_samples if position.loss_samples else math.nan
        record: dict[str, Any] = {
            "epoch": epoch,
            "step": position.step,
            "train_loss": _finite(train_loss),
            **{f"val_{name}": _finite(mean) for name, mean in zip(self.learner.names, means)},
        }
        with self.whole:
            position.metrics = record
            position.validated = position.step
            position.loss_sum, position.loss_samples = 0.0, 0
            self.metrics.append([record])
        every = self.config.checkpoint.every_epochs
        self.saves.due |= every is not None and epoch % every == 0
        self.progress.epoch(record)
        self.progress.restart_clock()
        return True

    def _plan(self) -> TrainBatches:
        steps = range(self.position.step, self.total_steps)
        return TrainBatches(self.order, steps, self.rank, self.size, self.config.train.accumulate)


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def join(config: Config, run: RunDir, world: World) -> Group:
    """Take this rank's device and meet the other ranks."""
    device = set_up_device(config, world)
    launch = config.launch
    return meet(world, device, run.meeting(world.attempt), launch.hang_timeout_s, launch.init_method)

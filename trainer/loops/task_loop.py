"""The ready-made loop: trains a Task from its newest checkpoint to the end of the run, or to a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer.config.checks import check_batch
from trainer.config.errors import ConfigError
from trainer.data.decoded_cache import DecodedCache
from trainer.data.loader import LoaderFactory, TrainBatchKeys, ValidationBatchKeys
from trainer.data.order import Order
from trainer.loops.learner import Learner
from trainer.loops.loop import AttemptContext, Loop, NotFinite, finite
from trainer.task import Task


class TaskLoop(Loop):
    """Trains a Task: steps and, after each epoch, a validation."""

    def __init__(self, task: type[Task], context: AttemptContext) -> None:
        super().__init__(context)
        config, group = self.config, self.group
        check_batch(config.train.batch_size, [self.size], config.train.accumulate)

        self.watch.enter("preparing data")
        self.task = task(config)
        group.node_by_node(self.task.prepare)
        self.train_set, val_set = self.task.datasets()
        for name, dataset in (("train", self.train_set), ("val", val_set)):
            if isinstance(decoded := getattr(dataset, "decoded", None), DecodedCache):
                decoded.open_shared(group, name)
        counts = [len(dataset) for dataset in (self.train_set, val_set)]  # type: ignore[arg-type]
        if not all(counts):
            raise ConfigError(
                f"data.name={config.data.name}: empty ({counts[0]} training, {counts[1]} validation samples)"
            )
        self.order = Order(counts[0], config.train.batch_size, config.seed)
        self.total_steps = config.train.epochs * self.order.steps_per_epoch
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self._announce_length(self.total_steps, config.train.batch_size)

        self.learner = Learner(config, self.task, group, self.total_steps)
        collate = None if task.collate is Task.collate else self.task.collate
        self.loading = LoaderFactory(collate, config.data.workers, group.device, config.launch.hang_timeout_s)
        self.validation = ValidationBatchKeys(counts[1], config.train.batch_size, self.rank, self.size)
        self.validation_loader = self.loading.loader(val_set, config.seed, self.validation)
        self.watch.measure(lambda: self.learner.busy_s)
        self.startup.done("data and model")

    def restore(self, step: int | None) -> None:
        """Warm up, then load the checkpoint of `step`; None: keep the initial state."""
        train = self.config.train
        self.watch.enter("warming up")
        micro_batch = train.batch_size // (self.size * train.accumulate)
        self.learner.warm_up(self.loading.warm_up_batch(self.train_set, self.config.seed, micro_batch))
        self.startup.done("warm-up")
        self.watch.enter("restoring")
        if step is not None:
            self.learner.load_state_dict(self._load_checkpoint(step))
        self._finish_restore()
        self.progress.say(
            f"{'starting' if step is None else f'resuming after step {step}'}: {self.total_steps} steps, "
            f"{self.order.steps_per_epoch} per epoch, {self.size} ranks on {self.group.device.type}"
        )

    def _train(self) -> bool:
        self.watch.enter("training")
        loader = self.loading.loader(self.train_set, self.config.seed, self._batches())
        try:
            return self._steps(iter(loader))
        finally:
            loader.close()
            self.validation_loader.close()

    def _steps(self, batches: Iterator[Any]) -> bool:
        while True:
            if self._validation_due() and not self._validate():
                return False
            if self.saves.due:
                self.save()
            if self.position.step == self.total_steps:
                return True
            if not self.stop.begin_tick():
                return False
            self._step(batches)

    def _step(self, batches: Iterator[Any]) -> None:
        position, step = self.position, self.position.step
        began = time.perf_counter()
        counts = self.order.micro_batch_sizes(step, self.rank, self.size, self.config.train.accumulate)
        micro_batches = [(next(batches), count) for count in counts]
        waited_s = time.perf_counter() - began
        self.learner.busy_s += waited_s
        self.progress.add_data_wait(waited_s)
        samples = self.order.count(step)
        self.learner.learn(step, micro_batches, samples)
        with self.state_lock:
            measured = self.learner.update()
            self.last_update.mark()
            self.readback.add(step, measured)
            position.step += 1
            position.samples += samples
        self._step_done(samples, self._validation_due())

    def _state(self) -> dict[str, Any]:
        return self.learner.state_dict()

    def _epoch(self) -> int:
        return self.order.epoch(max(self.position.step - 1, 0)) + 1

    def _record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        position, loss, samples = self.position, measured["loss"], self.order.count(step)
        record: dict[str, Any] = {
            "epoch": self.order.epoch(step) + 1,
            "loss": finite(loss),
            "lr": self.learner.rates.at(step)[0],
        }
        if "grad_norm" in measured:
            record["grad_norm"] = finite(measured["grad_norm"])
        if measured["nonfinite"]:
            self._not_finite(step, "gradient" if math.isfinite(loss) else "loss")
            record["skipped"] = True
        else:
            position.loss_sum += loss * samples
            position.loss_samples += samples
        return record

    def _not_finite(self, step: int, what: str) -> None:
        """The loss or the gradient (`what`) of `step` (from 0) is not finite: raise NotFinite, unless
        train.nonfinite=skip."""
        what = f"step {step + 1}: the {what} is not finite"
        if self.config.train.nonfinite == "fail":
            self.restored = False  # the state since that step is not worth a checkpoint
            raise NotFinite(f"{what}; train.nonfinite=skip would leave such steps out")
        self.position.skipped += 1
        self.progress.say(f"WARNING: {what}, its update was left out ({self.position.skipped} so far)")

    def _validation_due(self) -> bool:
        step = self.position.step
        ends_epoch = step > 0 and (step % self.order.steps_per_epoch == 0 or step == self.total_steps)
        return ends_epoch and self.position.validated != step

    def _validate(self) -> bool:
        """Validate the model and end the epoch. False when the ranks agreed to stop: a resumed run validates again."""
        position = self.position
        self.learner.train(False)
        sums = torch.zeros(len(self.learner.names), dtype=torch.float64, device=self.group.device)
        for number, batch in enumerate(self.validation_loader):
            if not self.stop.begin_tick():
                return False
            sums += self.learner.evaluate(position.step, number, batch, len(self.validation.indices(number)))
        self.learner.train(True)

        averages = [total / self.validation.samples for total in self.group.sum(sums).tolist()]
        train_loss = position.loss_sum / position.loss_samples if position.loss_samples else math.nan
        record = {
            "epoch": self._epoch(),
            "step": position.step,
            "train_loss": finite(train_loss),
            **{f"val_{name}": finite(mean) for name, mean in zip(self.learner.names, averages)},
        }
        self._end_epoch(record)
        return True

    def _batches(self) -> TrainBatchKeys:
        steps = range(self.position.step, self.total_steps)
        return TrainBatchKeys(self.order, steps, self.rank, self.size, self.config.train.accumulate)

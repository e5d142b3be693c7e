"""The training loop of one attempt: from the newest checkpoint to the end of the run, or to a stop."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.config import Config, ConfigError, check_batch
from trainer.data.loader import Loading, TrainBatches, ValidationBatches, close_loader
from trainer.data.order import Order
from trainer.learner import Learner, learning_rate
from trainer.observe.metrics import MetricsFile
from trainer.observe.progress import Progress
from trainer.rundir import RunDir
from trainer.state.pack import load
from trainer.state.saver import About, save_alone
from trainer.state.store import CheckpointError, CheckpointStore
from trainer.task import load_task
from trainer.world.detect import World
from trainer.world.device import set_up_device
from trainer.world.meet import Group, meet
from trainer.world.signals import Signals
from trainer.world.stop import Stop

MAX_FAILED_SAVES = 3
RETRY_MINUTES = 1.0


@dataclass
class Position:
    """How far a run has come. Steps and samples count over all epochs, from the start of the run."""

    step: int = 0
    samples: int = 0  # consumed by finished steps, never merely prefetched
    validated: int = 0  # the step after which the latest finished validation ran
    loss_sum: float = 0.0  # over the samples of the epoch so far
    loss_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the latest epoch's line of metrics.jsonl
    metrics_offset: int = 0  # bytes of metrics.jsonl that belong to this position


class Loop:
    """Trains. Every rank runs one, in step with the others; rank 0's also writes."""

    def __init__(self, config: Config, run: RunDir, group: Group, signals: Signals) -> None:
        self.config = config
        self.group = group
        self.stop = Stop(group.world, group.store, signals, config.launch.hang_timeout_s)
        self.rank, self.size = group.world.rank, group.world.size
        check_batch(config.train.batch_size, self.size, config.train.accumulate)

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

        self.learner = Learner(config, task, group, self.total_steps)
        pin, timeout_s = group.device.type == "cuda", config.launch.hang_timeout_s
        self.loading = Loading(task.collate, config.data.workers, pin, timeout_s)
        self.validation = ValidationBatches(counts[1], config.train.batch_size, self.rank, self.size)
        self.validation_loader = self.loading.loader(val_set, config.seed, self.validation)

        self.store = CheckpointStore(run.checkpoints)
        self.metrics = MetricsFile(run.metrics)
        self.progress = Progress(self.rank == 0, self.total_steps)
        self.position = Position()
        self.pending: list[tuple[int, Tensor]] = []  # (step, this rank's loss sum), not yet in metrics.jsonl
        self.save_due = False
        self.saved = (0, 0)  # step and validated of the latest checkpoint
        self.saved_at = time.monotonic()
        self.failed_saves = 0  # in a row

    def restore(self, step: int | None) -> None:
        """Put in the checkpoint of `step`, or the initial state when there is none."""
        train = self.config.train
        state = copy.deepcopy(self.learner.state_dict())
        micro_batch = train.batch_size // (self.size * train.accumulate)
        self.learner.warm_up(self.loading.warm_up_batch(self.train_set, self.config.seed, micro_batch))
        if step is not None:
            state = load(self.store.path(step), self.store.manifest(step))
            self.position = Position(**state["position"])
        self.learner.load_state_dict(state)
        self.saved = (self.position.step, self.position.validated)
        if self.rank == 0:
            self.metrics.rewind(self.position.metrics_offset)
        self.progress.say(
            f"{'starting' if step is None else f'resuming after step {step}'}: {self.total_steps} steps, "
            f"{self.order.steps_per_epoch} per epoch, {self.size} ranks on {self.group.device.type}"
        )

    def run(self) -> bool:
        """Train and save. True when the run is finished, False when the ranks agreed to stop."""
        self.saved_at = time.monotonic()
        batches = iter(self.loading.loader(self.train_set, self.config.seed, self._plan()))
        try:
            finished = self._train(batches)
        finally:
            close_loader(batches)
            close_loader(getattr(self.validation_loader, "_iterator", None) or iter(()))
        self.save(must=True)
        return finished

    def part(self) -> None:
        """Leave the other ranks, once rank 0 has come here: whatever it had to save is saved."""
        self.group.follow_rank_0()
        self.stop.close()
        self.group.close()

    def save(self, must: bool = False) -> None:
        """Commit a checkpoint of this position, unless there is one. All ranks call it together; rank 0 writes.

        Training goes on when the disk refuses: the save is tried again a minute later, and at once when it `must` be.
        Raises CheckpointError when `MAX_FAILED_SAVES` in a row have failed.
        """
        self.flush()
        self.save_due = False
        if self.rank == 0:
            while not self._write_checkpoint() and must:
                time.sleep(2)
        self.saved_at = time.monotonic()
        self.progress.restart_clock()

    def _write_checkpoint(self) -> bool:
        position = self.position
        if self.saved == (position.step, position.validated):
            return True
        try:
            position.metrics_offset = self.metrics.sync()
            state = {"position": asdict(position), **self.learner.state_dict()}
            about = About(
                position.step,
                self.order.epoch(max(position.step - 1, 0)) + 1,
                position.samples,
                position.metrics if position.validated == position.step else {},
            )
            save_alone(self.store, about, state, self.size, lambda: None, "rank0")
        except (CheckpointError, OSError) as error:
            self.failed_saves += 1
            if self.failed_saves >= MAX_FAILED_SAVES:
                raise CheckpointError(f"{self.failed_saves} saves in a row failed, the last so: {error}") from error
            self.progress.say(f"WARNING: {error}; training goes on, the save is tried again")
            return False
        self.failed_saves = 0
        self.saved = (position.step, position.validated)
        self.store.prune(position.step, self.config.checkpoint.keep_last, self.config.checkpoint.keep_best)
        self.progress.say(f"saved step {position.step}")
        return True

    def flush(self) -> None:
        """Enter the finished steps in metrics.jsonl. All ranks call it together.

        Until then each rank keeps its sums on the device: a step costs no collective and no synchronisation for them.
        """
        if not self.pending:
            return
        minutes = RETRY_MINUTES if self.failed_saves else self.config.checkpoint.every_minutes
        clock_says_save = minutes is not None and time.monotonic() - self.saved_at > 60 * minutes
        # The ranks' clocks differ, so rank 0's decides, and travels along.
        clock = torch.tensor(float(clock_says_save and self.rank == 0), dtype=torch.float64, device=self.group.device)
        sums = self.group.sum(torch.stack([clock, *(loss_sum for _, loss_sum in self.pending)])).tolist()
        self.save_due |= sums[0] > 0

        records = []
        for (step, _), loss_sum in zip(self.pending, sums[1:]):
            samples = self.order.count(step)
            self.position.loss_sum += loss_sum
            self.position.loss_samples += samples
            records.append(
                {
                    "step": step + 1,
                    "epoch": self.order.epoch(step) + 1,
                    "loss": loss_sum / samples,
                    "lr": learning_rate(self.config.optim, step, self.total_steps),
                    "samples_per_s": round(self.progress.throughput(), 1),
                    "time": time.time(),
                }
            )
        self.pending.clear()
        if self.rank == 0:
            self.metrics.append(records)
            last = records[-1]
            self.progress.step(last["step"], last["epoch"], last["loss"], last["lr"], self.config.train.batch_size)
        self.progress.restart_clock()

    def _train(self, batches: Iterator[Any]) -> bool:
        while True:
            if self._validation_due() and not self._validate():
                return False
            if self.save_due:
                self.save()
            if self.position.step == self.total_steps:
                return True
            if not self.stop.begin_tick():
                return False
            self._train_step(batches)

    def _train_step(self, batches: Iterator[Any]) -> None:
        position, step = self.position, self.position.step
        counts = self.order.share_counts(step, self.rank, self.size, self.config.train.accumulate)
        micro_batches = [(next(batches), count) for count in counts]
        samples = self.order.count(step)
        self.pending.append((step, self.learner.step(step, micro_batches, samples)))
        position.step += 1
        position.samples += samples
        self.progress.count(samples)
        every = self.config.checkpoint.every_steps
        self.save_due |= every is not None and position.step % every == 0
        if position.step % self.config.train.log_every == 0 or self._validation_due():
            self.flush()

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
        record: dict[str, Any] = {
            "epoch": epoch,
            "step": position.step,
            "train_loss": position.loss_sum / position.loss_samples,
            **{f"val_{name}": mean for name, mean in zip(self.learner.names, means)},
        }
        position.metrics = record
        position.validated = position.step
        position.loss_sum, position.loss_samples = 0.0, 0
        every = self.config.checkpoint.every_epochs
        self.save_due |= every is not None and epoch % every == 0
        if self.rank == 0:
            self.metrics.append([record])
        self.progress.epoch(record)
        self.progress.restart_clock()
        return True

    def _plan(self) -> TrainBatches:
        steps = range(self.position.step, self.total_steps)
        return TrainBatches(self.order, steps, self.rank, self.size, self.config.train.accumulate)


def join(config: Config, run: RunDir, world: World) -> Group:
    """Take this rank's device and meet the other ranks."""
    device = set_up_device(config, world)
    return meet(world, device, run.meeting(world.attempt), config.launch.hang_timeout_s)

"""The ready-made loop: trains a Task from its newest checkpoint to the end of the run, or to a stop.

In order: a warm-up, the checkpoint or model.weights; then, until the last step, a validation where an epoch has ended,
a save where one is due, the agreement that no rank stops here, and a step (`TaskLoop._steps`). Besides: the data sets,
`Validation`, and `evaluate`, which validates a checkpoint outside of any attempt.
"""

from __future__ import annotations

import collections
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from laststep import compat
from laststep.checkpoint.export import Weights
from laststep.checkpoint.manager import Position
from laststep.checkpoint.restore import SharedCheckpoint
from laststep.config.checks import check_batch, check_shards, check_size
from laststep.config.config import Config, changed_ends
from laststep.config.errors import ConfigError, NotFinite
from laststep.config.keep import Ranking
from laststep.config.reads import FOR_A_TASK, GivenKeys, declared
from laststep.config.schema import READY_MADE
from laststep.data.loader import DeviceLoader, LoaderFactory, TrainBatchKeys, ValidationBatchKeys
from laststep.data.order import Order
from laststep.loops.digest import difference_between_ranks
from laststep.loops.engine import AttemptContext, Engine, Loop
from laststep.loops.initial_weights import PATIENCE_S, Plan, fit, plan_for, read_initial_weights
from laststep.loops.learner import VAL, LateUpdate, Learner
from laststep.loops.measured import as_numbers, finite
from laststep.loops.probe import Probe
from laststep.loops.shares import in_order, shares_of
from laststep.loops.snapshot import HostSnapshot
from laststep.optim.build import check_order, schedule_keys
from laststep.ranks.beside import signpost
from laststep.ranks.group import Group, join, tree_sum
from laststep.ranks.world import World, hostname
from laststep.records.plan import check_fingerprint, read_given, write_fingerprint
from laststep.rundir import RunDir
from laststep.say import counted
from laststep.task import EpochEnd, Task, find_task, make_task


class TaskLoop(Loop):
    """Trains a Task: steps and, after each epoch, a validation."""

    def __init__(self, task: type[Task], context: AttemptContext) -> None:
        self.config, self.group = config, group = context.config, context.group
        self.engine = engine = Engine(context, self)
        self.rank, self.size = engine.rank, engine.size
        check_size(config.train.shares, self.size)
        world = group.world
        check_shards(config.train, world.nodes, world.size // world.nodes, world.hosts)
        check_batch(config.train.batch_size, [self.size], config.train.accumulate, config.train.shares)

        engine.watch.enter("preparing data")
        self.initial_weights, self.data_record = context.run.initial_weights, context.run.data
        self._given = given_keys(task, config, read_given(context.run.given))
        self.task = make_task(task, self._given.reads.watch(config))
        self._derives = task.derived is not Task.derived
        self._has_hook = task.on_epoch_end is not Task.on_epoch_end
        self._ends_run = False  # with the epoch that is ending
        self._folder = context.run.path
        datasets = open_datasets(config, self.task, group)
        self.train_set, self._val_sets = datasets.train, datasets.val
        train = config.train
        parts = (train.epoch_samples, train.overfit_batches)
        self.order = Order.of(datasets.train_samples, train.batch_size, config.seed, *parts)
        self.total_steps = config.train.epochs * self.order.steps_per_epoch
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        engine.announce_length(self.total_steps, config.train.batch_size, datasets.train_samples)

        self.learner = Learner(config, self.task, group, self.total_steps, engine.ring)
        if LateUpdate.helps(self.learner, engine.queue):
            engine.late_update = LateUpdate(self.learner, self.order, engine.ring, engine.queue)
        engine.hold_shard(self.learner.place)
        steps, total_shares = range(self.total_steps), train.shares or self.size
        self._keys = TrainBatchKeys(
            self.order, steps, self.learner.shares, total_shares, train.accumulate, train.skip_samples
        )
        self.loading = make_loading(config, self.task, group)
        few = engine.probe.validation_batches if engine.probe else None
        self.validation = Validation(config, datasets, self.loading, group, few)
        self.micro_batches = config.train.accumulate * len(self.learner.shares)  # of this rank, per step
        engine.watch.measure(lambda: engine.ring.busy_s)
        if (probe := engine.probe) is not None:
            probe.variables.leave_out(self.learner.model)
            if not config.train.compile:  # the probe would be compiled too
                probe.watch(self.learner.gradients.parallel)
            probe.watch(self.learner.optimizer)
        engine.startup.done("data and model")

    def restore(self, checkpoint: SharedCheckpoint | None) -> None:
        """Warm up, then load the checkpoint; None: keep the initial state."""
        self._check_data(begins=checkpoint is None)
        train = self.config.train
        starts_anew = checkpoint is None and self.config.model.weights is not None
        initial = self._read_initial_weights() if starts_anew else None
        self.engine.watch.enter("warming up")
        if train.compile:
            compat.on_compiling(self.engine.watch.compiling)
        micro_batch = train.batch_size // (self.size * self.micro_batches)
        seed = self.config.seed
        self.learner.warm_up(
            self.loading.warm_up_batch(self.train_set, seed, micro_batch),
            {name: self.loading.warm_up_batch(each, seed, micro_batch) for name, each in self._val_sets.items()}
            if train.sanity
            else None,
        )
        self._check_keys()
        self.engine.startup.done("warm-up")
        self.engine.watch.enter("restoring")
        if checkpoint is not None:
            check_order(self.learner.sorted, checkpoint.manifest.numerics)
            self.engine.take_position(Position(**checkpoint.position))
            self.engine.compare_numerics(checkpoint)
            self.learner.load_state_dict(checkpoint.load(self.learner.live_state(), self.engine.watch.advance))
            self._check_end(checkpoint.manifest.config)
        elif initial is not None:
            self.learner.start_from(initial)
        elif self.config.checkpoint.start_from is not None:
            objects = {"model": self.learner.model}, {"optimizer": self.learner.optimizer}
            source, record, say = self.config.checkpoint.start_from, self.initial_weights, self.engine.progress.say
            self.learner.start_from(plan_for(source, *objects, self.group, record, say))
        self.engine.finish_restore()
        begins = "starting" if checkpoint is None else f"resuming after step {self.engine.position.step}"
        self.engine.progress.say(
            f"{begins}: {counted(self.total_steps, 'step')}, "
            f"{self.order.steps_per_epoch} per epoch, {counted(self.size, 'rank')} on {self.group.device.type}"
        )

    def _check_keys(self) -> None:
        """Raise ConfigError for a key that the user has set and that nothing has read by now: the data sets, the model
        and the optimiser are made, and a step and a validation batch are done. A schedule may read some keys late."""
        if type(self.task).schedule is Task.schedule:
            self._given.reads.keys |= schedule_keys(self.config.optim)
        else:
            for step in (0, self.total_steps // 2, self.total_steps - 1):
                self.learner.rates.at(step)
        self.engine.check_given(self._given)

    def _check_data(self, begins: bool) -> None:
        """Record what the run begins with, or raise ConfigError if these are not the data that it began with."""
        fingerprint = self.task.fingerprint()
        if fingerprint is not None and not begins:
            check_fingerprint(self.data_record, fingerprint, named(self.config))
        elif fingerprint is not None and self.rank == 0:
            write_fingerprint(self.data_record, fingerprint)

    def _check_end(self, before: str) -> None:
        """The run may end later than when the checkpoint was saved, with the configuration `before`, in YAML. An end
        within an epoch has closed that epoch, which is now continued. Raises ConfigError for an earlier end."""
        position, total = self.engine.position, self.total_steps
        if before and changed_ends(Config.parse(before), self.config):
            position.finished = False
        done = position.step % self.order.steps_per_epoch
        if position.step > total:
            raise ConfigError(f"train.epochs, train.max_steps: end the run at step {total}; it is at {position.step}")
        if position.validated == position.step < total and done and not position.finished:
            position.reopen_epoch(begins_after=position.step - done)
            self.learner.task_state.reopen_epoch()

    def _read_initial_weights(self) -> Plan:
        """What rank 0 reads as model.weights. The others wait without limit: it may download."""
        plan = Plan()
        if self.rank == 0:
            plan = read_initial_weights(self.config, self.learner.model, self.initial_weights)
            for line in plan.lines:
                self.engine.progress.say(line)
        self.group.barrier(PATIENCE_S)
        return plan

    def train(self) -> bool:
        """Train to the end of the run, or to a stop."""
        self.engine.watch.enter("training")
        self._keys.steps = range(self.engine.position.step, self.total_steps)
        loader = self.loading.loader(self.train_set, self.config.seed, self._keys)
        try:
            return self._steps(iter(loader))
        finally:
            loader.close()
            self.validation.close()

    def _steps(self, batches: Iterator[Any]) -> bool:
        while True:
            if self._validation_due() and not self._validate():
                return False
            if self.engine.saves.due:
                self.engine.save()
            if self.engine.position.step == self.total_steps or self.engine.position.finished:
                return True
            if not self.engine.stop.begin_tick():
                return False
            self._step(batches)

    def _step(self, batches: Iterator[Any]) -> None:
        step = self.engine.position.step
        if self.engine.probe is not None:
            batches = self._probed(self.engine.probe, step, batches)
        self.engine.ring.begin_work()
        counts, samples = self._keys.counts(step), self.order.count(step)
        loaded = self._loaded(batches, len(counts))
        if left_out := self._is_left_out(step):
            collections.deque(loaded, maxlen=0)
        else:
            self.learner.learn(step, loaded, counts, self._keys.samples(step))
        self.engine.begin_update()
        self.engine.end_update({} if left_out else self.learner.update(), samples)
        self.engine.step_done(samples, self._validation_due())

    def _loaded(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """The next `count` batches, each loaded when its turn comes: a device does not hold those of all shares at
        once."""
        for _ in range(count):
            began = time.perf_counter()
            with signpost.doing("waiting for data"):
                batch = next(batches)
            self.engine.progress.add_data_wait(time.perf_counter() - began)
            yield batch

    def _is_left_out(self, step: int) -> bool:
        """Whether `step` (from 0) changes nothing: train.skip_steps has it, or train.skip_samples all of its batch."""
        return step + 1 in self.config.train.skip_steps or not self._keys.samples(step)

    def _probed(self, probe: Probe, step: int, batches: Iterator[Any]) -> Iterator[Any]:
        """The micro-batches of `step` (from 0), which the probe has seen."""
        micro_batches, of_epoch = list(islice(batches, self.micro_batches)), step % self.order.steps_per_epoch
        variables = probe.variables.of_object("self", self.task)
        probe.begin_step(step + 1, self.order.epoch(step) + 1, of_epoch + 1, micro_batches, variables)
        return iter(micro_batches)

    def state(self) -> dict[str, Any]:
        """See Learner.state_dict."""
        return self.learner.state_dict()

    def digested(self) -> dict[str, Any]:
        """See Learner.digested."""
        return self.learner.digested()

    def hold(self) -> HostSnapshot:
        """The same, as the host has it."""
        return self.learner.hold(self.engine.queue.on_host)

    def epoch(self) -> int:
        """The epoch of the last finished step, from 1."""
        return self.order.epoch(max(self.engine.position.step - 1, 0)) + 1

    def record(self, step: int, measured: Mapping[str, float]) -> dict[str, Any]:
        """The loss, the learning rate and the norm of the gradient, as the step has measured them. Raises NotFinite."""
        if self._is_left_out(step):
            return {"epoch": self.order.epoch(step) + 1, "loss": None, "skipped": True}
        position, loss, samples = self.engine.position, measured["loss"], self._keys.samples(step)
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

    def lines(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        """Its line, with what the task derives from it."""
        self._add_derived(line)
        return [line]

    def _add_derived(self, line: dict[str, Any]) -> dict[str, Any]:
        """Add to a line of metrics.jsonl what the task derives from it."""
        if self._derives:
            line |= self.task.derived(line, self.order.seen(line["step"]), self.size)
        return line

    def _not_finite(self, step: int, what: str) -> None:
        """The loss or the gradient (`what`) of `step` (from 0) is not finite: raise NotFinite, unless
        train.nonfinite=skip."""
        what = f"step {step + 1}: the {what} is not finite"
        if self.config.train.nonfinite == "fail":
            self.engine.spoil()
            raise NotFinite(f"{what}; train.nonfinite=skip would leave such steps out")
        self.engine.position.skipped += 1
        self.engine.progress.say(f"WARNING: {what}, its update was left out ({self.engine.position.skipped} so far)")

    def _validation_due(self) -> bool:
        step = self.engine.position.step
        ends_epoch = step > 0 and (step % self.order.steps_per_epoch == 0 or step == self.total_steps)
        return ends_epoch and self.engine.position.validated != step

    def _validate(self) -> bool:
        """Validate the model and end the epoch. False when the ranks agreed to stop: a resumed run validates again."""
        position = self.engine.position
        with signpost.doing("validation"):
            means = self.validation.measure(self.learner, position.step, self._begin_validation_batch)
        if means is None:
            return False
        train_loss = position.loss_sum / position.loss_samples if position.loss_samples else math.nan
        record = {
            "epoch": self.epoch(),
            "step": position.step,
            "train_loss": finite(train_loss),
            **means,
        }
        self._add_derived(record)
        if self._has_hook:
            self._call_hook(record)
        self.learner.task_state.capture(cuts_epoch=position.step % self.order.steps_per_epoch != 0)
        self.engine.end_epoch(record)
        if record["epoch"] == 1:
            for line in (*self._given.late(), *self._unranked(record)):
                self.engine.progress.say(line)
        return True

    def _call_hook(self, record: dict[str, Any]) -> None:
        """Call the task's `on_epoch_end`, and add to the line of the epoch what it logs. A rescue meanwhile saves the
        state before it: a resumed run validates again, and calls it again. Raises ConfigError."""
        says = f"task={self.config.task}: on_epoch_end()"
        measured = {name: value for name, value in record.items() if name not in ("epoch", "step")}
        with self.learner.looked_at(record["step"]) as model:
            run = EpochEnd(record["epoch"], record["step"], measured, model, self.rank, self._folder)
            self.task.on_epoch_end(run)
        if taken := record.keys() & run.logged.keys():
            raise ConfigError(f"{says}: run.log({min(taken)}=...): the epoch's line has that already")
        logged = {name: finite(value) for name, value in as_numbers(f"{says}: run.log", run.logged).items()}
        given = {"log": logged, "end_run": run.ends_run, "state_dict": self.learner.task_state.live()}
        if self.size > 1 and (difference := difference_between_ranks(given, self.group)):
            self.engine.spoil()
            raise ConfigError(f"{says}: must do the same on every rank; different: {difference}")
        record |= logged
        self._ends_run = run.ends_run

    def epoch_written(self) -> None:
        """What the task has kept of the epoch is in the state, and it may have ended the run."""
        self.learner.task_state.commit()
        if self._ends_run:
            self.engine.position.finished = True
            self.engine.progress.say(f"epoch {self.epoch()}: on_epoch_end() ends the run")

    def before_save(self) -> None:
        """Raise ConfigError unless the task's own state is the same on every rank: each writes a part of it. A
        collective if it has one."""
        state, engine = self.learner.task_state, self.engine
        if not state.exists or self.size == 1 or engine.saves.saved.same_moment(engine.position):
            return
        if difference := difference_between_ranks({"state_dict": state.committed}, self.group):
            engine.spoil()
            raise ConfigError(f"task={self.config.task}: state_dict() must be the same on every rank: {difference}")

    def _unranked(self, record: Mapping[str, Any]) -> Iterator[str]:
        """A line if checkpoints are ranked by a value that no epoch has."""
        by = Ranking.parse(self.config.checkpoint.best_by).metric
        if by not in record:
            others = ", ".join(name for name in record if name not in ("epoch", "step"))
            yield f"WARNING: checkpoint.best_by={by}: the epochs have {others}, so no checkpoint is the best"

    def _begin_validation_batch(self) -> bool:
        """False if the ranks agreed to stop before it."""
        begins = self.engine.stop.begin_tick()
        if begins and self.engine.probe is not None:
            self.engine.probe.begin_validation_batch(self.engine.position.step)
        return begins


@dataclass(frozen=True)
class Datasets:
    """A Task's data sets, those of validation by name, and how many samples they have."""

    train: Dataset[Any]
    val: dict[str, Dataset[Any]]
    train_samples: int
    val_samples: dict[str, int]


def open_datasets(config: Config, task: Task, group: Group) -> Datasets:
    """Prepare and open the data sets. A collective. Raises ConfigError when one is empty."""
    group.node_by_node(task.prepare)
    found: Any = task.datasets()
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        what = f"{len(found)} of them" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
        raise ConfigError(
            f"task={config.task}: datasets() must return the training set and the validation set, not {what}"
        )
    train_set, val_sets = found
    if not isinstance(val_sets, Mapping):
        val_sets = {VAL: val_sets}
    if wrong := [name for name in val_sets or [""] if not re.fullmatch(r"(val|test)(_\w+)?", str(name), re.ASCII)]:
        raise ConfigError(
            f"task={config.task}: datasets(): {wrong[0]!r} cannot be the name of a validation set; call it val or "
            "test, or begin its name with val_ or test_"
        )
    for name, dataset in (("train", train_set), *val_sets.items()):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            what = f"a {type(dataset).__name__}, without __len__ and __getitem__"
            raise ConfigError(f"task={config.task}: datasets(): the {SETS.get(name, f'set {name}')} is {what}")
        # Of ImageFiles, whose module takes a second to import.
        cache: Any = getattr(dataset, "decoded", None)
        if hasattr(cache, "open_shared"):
            cache.open_shared(group, name)
    train, val = len(train_set), {name: len(dataset) for name, dataset in val_sets.items()}
    if not (train and all(val.values())):
        counts = ", ".join(f"{count} {'validation' if name == VAL else name}" for name, count in val.items())
        raise ConfigError(f"{named(config)}: empty ({train} training, {counts} samples)")
    return Datasets(train_set, dict(val_sets), train, val)


SETS = {"train": "training set", VAL: "validation set"}


def given_keys(task: type[Task], config: Config, given: Sequence[str]) -> GivenKeys:
    """Whether a Task reads the keys that the user has set."""
    return GivenKeys(config.task, given, FOR_A_TASK, declared(task.reads, task.settings))


def named(config: Config) -> str:
    """What a message about the data names: a task of the user's own need not read `data.name`."""
    return f"data.name={config.data.name}" if config.task in READY_MADE else f"task={config.task}"


def make_loading(config: Config, task: Task, group: Group) -> LoaderFactory:
    """What makes the loaders of a Task's data sets."""
    collate = None if type(task).collate is Task.collate else task.collate
    return LoaderFactory(collate, config.data.workers, group.device)


class Validation:
    """Measures a learner's model on the validation sets, or on the first `most` batches of each."""

    def __init__(
        self, config: Config, datasets: Datasets, loading: LoaderFactory, group: Group, most: int | None = None
    ) -> None:
        self._group, self._train, self._task = group, config.train, config.task
        shares, total = shares_of(config.train, group.world), config.train.shares or group.world.size
        self._sets: dict[str, tuple[ValidationBatchKeys, DeviceLoader]] = {}
        if len(datasets.val) > 1:  # each would keep worker processes of its own
            loading = replace(loading, persistent_workers=False)
        for name, dataset in datasets.val.items():
            samples, size = datasets.val_samples[name], config.train.batch_size
            keys = ValidationBatchKeys(min(samples, (most or samples) * size), size, shares, total)
            self._sets[name] = keys, loading.loader(dataset, config.seed, keys)

    def measure(self, learner: Learner, step: int, begin_batch: Callable[[], bool]) -> dict[str, float | None] | None:
        """The means over each validation set, named like val_loss; None for one that is not finite. A collective.

        `begin_batch` is called before each batch; once it returns False, so does this: None.
        """
        means: dict[str, float | None] = {}
        learner.train(False)
        for name in self._sets:
            found = self._measure(name, learner, step, begin_batch)
            if found is None:
                return None
            if taken := means.keys() & found.keys():
                raise ConfigError(f"task={self._task}: two validation sets have a {min(taken)}; name one differently")
            means |= found
        learner.train(True)
        return means

    def _measure(
        self, name: str, learner: Learner, step: int, begin_batch: Callable[[], bool]
    ) -> dict[str, float | None] | None:
        shares, (keys, loader) = len(learner.shares), self._sets[name]
        sums: list[Tensor | float] = [0.0] * shares  # each of shape (names,), once a batch has given the names
        for position, batch in enumerate(loader):
            number, share = divmod(position, shares)
            if share == 0 and not begin_batch():
                return None
            sums[share] += learner.evaluate(step, number, batch, len(keys.indices(number, share)), share, name)
        rows = torch.stack([each for each in sums if isinstance(each, Tensor)])
        if self._train.shares is None:
            totals = self._group.sum(rows[0])
        else:
            totals = tree_sum(in_order(torch.stack(self._group.gather(rows)), self._train, self._group.world))
        return {
            f"{name}_{of}": finite(total / keys.samples) for of, total in zip(learner.measured[name], totals.tolist())
        }

    def close(self) -> None:
        """End the worker processes."""
        for _, loader in self._sets.values():
            loader.close()


WARM_UP_SAMPLES = 2  # batch norm cannot train on one


def evaluate(config: Config, run: RunDir, weights: Weights, given: Sequence[str] = ()) -> dict[str, float | None]:
    """The validation metrics of these weights.

    `config` is for one rank. A model that was trained by one rank, on such a machine, gets the very metrics that its
    own validation has recorded; with train.shares, one that was trained by any number of ranks. Without it, with more
    ranks, these are the same sums, added in another order. Raises ConfigError, also for a key of `given` that the task
    does not read: the metrics would only seem to be others.
    """
    task_class = find_task(config)
    if not isinstance(task_class, type):
        raise ConfigError(
            f"task={config.task}: a custom training loop validates in its own code; load the weights there, by "
            f"laststep.load_weights({str(run.path)!r})"
        )
    world = World(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node=0,
        nodes=1,
        hosts=(hostname(),),
        job_id="evaluate",
        restart=0,
        attempt="evaluate",
        launcher="python",
        on_slurm=False,
    )
    group = join(config, world, run.meeting("evaluate"), config.launch.hang_timeout_s)
    if group.device.type == "cpu":
        torch.set_num_threads(int(weights.manifest.numerics.get("threads", torch.get_num_threads())))
    keys = given_keys(task_class, config, given)
    task = make_task(task_class, keys.reads.watch(config))
    datasets = open_datasets(config, task, group)
    learner = Learner(config, task, group, total_steps=1)
    loading = make_loading(config, task, group)
    learner.warm_up(loading.warm_up_batch(datasets.train, config.seed, WARM_UP_SAMPLES))
    if problem := keys.problem():
        raise problem
    fitted = fit(learner.model.state_dict(), weights.tensors, run.name)
    if fitted.classes is not None:
        there, here = fitted.classes
        what = "tokens in the vocabulary" if config.task == "language" else "classes"
        raise ConfigError(f"{named(config)}: {here} {what}, but {run.name} was trained on {there}")
    learner.start_from(Plan({"model": fitted.tensors}))
    if weights.task is not None and learner.task_state.exists:
        learner.task_state.load(weights.task)
    validation = Validation(config, datasets, loading, group)
    try:
        metrics = validation.measure(learner, weights.manifest.step, lambda: True)
    finally:
        validation.close()
    assert metrics is not None
    return {**metrics, **task.derived(metrics, 0, 1)}

"""Task, which users subclass to define what to train: data sets, model, and the loss and metrics of one batch."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from laststep import script
from laststep.config.args import user_args
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.reads import plain, seen_by
from laststep.config.schema import READY_MADE
from laststep.optim.build import make_optimizer, scheduled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class EpochEnd:
    """What `Task.on_epoch_end` is called with: an epoch that has ended and has been validated. The same on every rank,
    but for `rank`."""

    epoch: int  # from 1
    step: int  # finished steps, from the start of the run
    # The epoch's line of metrics.jsonl so far: train_loss, val_loss and so on; None for what is not finite.
    metrics: Mapping[str, float | None]
    model: nn.Module  # the one that was validated, so with train.ema_decay the average; in evaluation mode
    rank: int
    folder: Path  # the run's
    logged: dict[str, Any] = field(default_factory=dict)
    ends_run: bool = False

    def log(self, **values: Any) -> None:
        """Add numbers, or tensors of one element, to the epoch's line of metrics.jsonl. The same on every rank."""
        self.logged |= values

    def end_run(self) -> None:
        """Finish the run with this epoch, as if it were the last one. On every rank, or on none."""
        self.ends_run = True


class Task:
    """What to train. Subclass this and name the class in the configuration: `task: my_module.MyTask`.

        class MyTask(Task):
            def datasets(self):
                return train_set, val_set

            def model(self):
                return MyModel()

            def step(self, model, batch):
                x, y = batch
                logits = model(x)
                return {"loss": cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    The ready-made loop does the rest: batches, optimiser, schedule, validation after each epoch, metrics, checkpoints.
    `datasets`, `model` and `step` must be defined; the others may be.

    All of these may draw random numbers from the global generators of Python, NumPy and torch. Those are seeded from
    (seed, step, rank) before each step and from (seed, epoch, sample index) before each sample, so a resumed run draws
    the same numbers.
    """

    # A dataclass of yours: the type of `args`. Then a wrong name, a wrong type or a missing value is refused as the run
    # is submitted. None: `args` has an attribute for each key that is set.
    settings: type | None = None
    # The keys and sections of `model` and `data` that this class reads, such as ("model.name", "data"). Then any other
    # that is set is refused as the run is submitted. None: it is found out before the first step.
    reads: Collection[str] | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    @functools.cached_property
    def args(self) -> Any:
        """The settings of your own, `args.NAME=VALUE` in the configuration: `self.args.NAME`. Raises ConfigError."""
        return user_args(self.settings, plain(self.config).args, seen_by(self.config))

    def prepare(self) -> None:
        """Download or unpack the data. Called before `datasets`, on one rank of each node, one node after another."""

    def datasets(self) -> tuple[Dataset[Any], Any]:
        """The training set and the validation set, or a dict of validation sets, such as `{"val": a, "test": b}`: their
        metrics are val_loss, test_loss and so on. A name is val or test, or begins with val_ or test_. Each set has
        `__len__` and `__getitem__`, and none is empty."""
        raise NotImplementedError(f"{type(self).__name__} must define datasets()")

    def model(self) -> nn.Module:
        """The model, on the CPU, with its initial weights. Called after `datasets`."""
        raise NotImplementedError(f"{type(self).__name__} must define model()")

    def fingerprint(self) -> str | None:
        """Hook: what stands for the contents of the data sets, such as a hash. Called after `datasets`. A run is not
        resumed with other data than it has begun with. By default that is not checked."""
        return None

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The "loss" to minimise and any further metrics of one batch. Each is a scalar tensor, the mean over the
        samples of the batch.

        Called for training and for validation; `model.training` says which. Call `model(...)` itself, not a part of it:
        only then are gradients averaged over the ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step()")

    def validation_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Hook: what validation measures of one batch, as `step` returns it. It may be anything: no loss is needed. By
        default `step`, which must then return the same names in training and in validation."""
        return self.step(model, batch)

    def on_epoch_end(self, run: EpochEnd) -> None:
        """Hook: called on every rank when an epoch has been validated, before its line is in metrics.jsonl.

            bad, best = 0, float("inf")

            def on_epoch_end(self, run):
                self.bad = 0 if run.metrics["val_loss"] < self.best else self.bad + 1
                self.best = min(self.best, run.metrics["val_loss"])
                run.log(best=self.best)
                if self.bad == 3:
                    run.end_run()

        What it keeps in `self` for later epochs belongs to `state_dict`. If a rank dies within it, it is called again,
        with the state before it. It must not change the model. Generators are seeded from (seed, step), alike on every
        rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """Hook: the state of the Task itself, if it has one: plain values, tensors, and lists and dicts of them, the
        same on every rank between two steps. It is copied after each step and each validation; every checkpoint has it.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hook: take over what `state_dict` returned. Called before the first step of an attempt."""

    def on_device(self, batch: Any) -> Any:
        """Finish a batch once it is on the device, before `step`. By default the batch stays as it is."""
        return batch

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch from samples. By default torch's default_collate."""
        return default_collate(list(samples))

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Hook: cut the model for train.sharding, by torch's `fully_shard`: parts first, the model itself last. By
        default the repeated blocks of the model and the rest of it, in the precision of train.precision.

            def shard(self, model, mesh):
                for layer in model.encoder.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)

        Each parameter must be cut by its rows, as fully_shard does it. Called for the averaged model as well. `mesh`
        has the dimension "shard", and with train.sharding=hybrid also "replicate", unless train.shares adds the copies.
        """
        raise NotImplementedError("the default is in laststep.loops.sharded")

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimiser of the model, which is on its device. By default what `optim` in the configuration says.

            def optimizer(self, model):
                groups = [{"params": model.body.parameters(), "lr": 1e-4}, {"params": model.head.parameters()}]
                return torch.optim.AdamW(groups, lr=1e-3)

        It has all parameters of the model that require a gradient; freeze others in `model()`. Its state is in every
        checkpoint. Gradients are clipped as `optim.clip_norm` says. LBFGS and SparseAdam cannot be used.
        """
        return make_optimizer(model, self.config.optim)

    def derived(self, line: Mapping[str, Any], samples: int, ranks: int) -> dict[str, float]:
        """Hook: more values for a line of metrics.jsonl, computed from those that it has.

        `line` is that of a step, which has `samples_per_s`, or that of an epoch. `samples` have been trained on up to
        there, by `ranks` ranks now. Called on the CPU, for each line once.
        """
        return {}

    def schedule(self, step: int, total: int) -> float:
        """The factor on the learning rate of each parameter group at `step` (from 0) of `total` steps. By default what
        `optim.schedule` and `optim.warmup_steps` in the configuration say.

            def schedule(self, step, total):
                return min((step + 1) / 100, 1 - step / total)

        It must depend on nothing else but what `state_dict` holds and `on_epoch_end` changes: no checkpoint holds it,
        and a resumed run asks again.
        """
        return scheduled(1.0, self.config.optim, step, total)


def find_task(config: Config) -> type[Task] | Callable[[Any], Any]:
    """What `config.task` names: a subclass of Task, or a function with its own training loop.

    Raises ConfigError when it cannot be imported or is anything else.
    """
    if config.script:
        return functools.partial(script.run_as_main, config.script)
    path = READY_MADE.get(config.task, config.task)
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"task={config.task}: cannot be imported: {error}") from error
    if inspect.isclass(found):
        if not issubclass(found, Task):
            raise ConfigError(f"task={config.task}: is not a subclass of laststep.Task")
        return found
    if isinstance(found, Task):
        raise ConfigError(f"task={config.task}: is an instance; name its class, {type(found).__name__}")
    if inspect.ismodule(found):
        raise ConfigError(f"task={config.task}: is a module: name its Task class or function")
    if not inspect.isfunction(found):
        raise ConfigError(f"task={config.task}: is neither a subclass of laststep.Task nor a function")
    try:
        inspect.signature(found).bind(*([None] if args_parameter(found) is None else [None, None]))
    except TypeError:
        raise ConfigError(f"task={config.task}: must take the run, and perhaps args: def {name}(run)") from None
    return found


def make_task(kind: type[Task], config: Config) -> Task:
    """The task, with its configuration. Raises ConfigError if its constructor does not take that."""
    try:
        inspect.signature(kind).bind(config)
    except TypeError:
        raise ConfigError(
            f"task={config.task}: its constructor must take the configuration alone: "
            "def __init__(self, config): super().__init__(config)"
        ) from None
    task = kind(config)
    if not hasattr(task, "config"):  # __init__ has not called that of Task
        task.config = config
    return task


def args_parameter(function: Callable[..., Any]) -> inspect.Parameter | None:
    """The second parameter of a function with its own training loop, if it is named args: its settings."""
    parameters = inspect.signature(function).parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return positional[1] if len(positional) > 1 and positional[1].name == "args" else None

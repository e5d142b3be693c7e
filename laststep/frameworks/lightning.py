"""Lightning's Trainer, resumed exactly: `from laststep.frameworks.lightning import Trainer`, and `Trainer(run, ...)`.

Lightning keeps its own loop. It asks for a batch only when the step before is done: its fetcher takes none in advance
from a loader that has a length. A resumed run starts Lightning's loop as if it were new. At the first batch it sets
all of Lightning's counters to what they were when the step before that batch was done; Lightning's own restart is not
used. An epoch whose steps were over when the attempt began has only its validation left: `at_resumed_end` starts it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from laststep import compat, script
from laststep.config.errors import ConfigError
from laststep.data.loader import StepLoader
from laststep.frameworks import lightning_part, unusable
from laststep.frameworks.fabric import ddp_options
from laststep.frameworks.steps import FrameworkSteps, FrameworkValidation, adopted
from laststep.loops.custom_loop import LeaveFunction
from laststep.loops.gradients import rehearse_without_forward
from laststep.loops.run import Run, loop_of

if TYPE_CHECKING:
    from lightning import pytorch
else:
    try:
        pytorch = lightning_part("pytorch")
    except ImportError as error:
        raise unusable(__name__, error) from error

DDP = {"auto": None, "ddp": None, "ddp_find_unused_parameters_false": False, "ddp_find_unused_parameters_true": True}


class Trainer(pytorch.Trainer):
    """Lightning's Trainer for a run: `Trainer(run, max_epochs=5)`. A script may leave `run` out. Other arguments are
    Lightning's; the ranks are the run's, whatever `devices` and `num_nodes` say.

    `fit` takes its training data from a DataLoader, a datamodule or the module, or what `run.loader(dataset,
    batch_size)` gave. Checkpoint callbacks are left out, with a warning. Raises ConfigError for what would keep a run
    from resuming exactly.
    """

    def __init__(self, run: Run | None = None, **arguments: Any) -> None:
        run = script.run() if run is None else run
        _refuse(arguments)
        strategy = arguments.get("strategy", "auto")
        if not isinstance(strategy, pytorch.strategies.ModelParallelStrategy):
            unused = DDP[strategy]
            options = ddp_options(run) | ({} if unused is None else {"find_unused_parameters": unused})
            strategy = _Strategy(run, **options)
        for name, value in ddp_options(run).items():
            setattr(strategy, name, value)
        arguments.update(strategy=strategy, num_nodes=loop_of(run).group.world.nodes, devices="auto")
        arguments.setdefault("enable_progress_bar", sys.stdout.isatty())
        callbacks = arguments.pop("callbacks", None) or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if any(isinstance(callback, pytorch.callbacks.GradientAccumulationScheduler) for callback in callbacks):
            raise ConfigError(
                "Trainer(callbacks=...): remove GradientAccumulationScheduler; accumulate_grad_batches stays the same"
            )
        self._follower = _Follower(run)
        callbacks = self._follower.without_checkpoints(callbacks)
        super().__init__(callbacks=[self._follower, *callbacks], **arguments | {"enable_checkpointing": False})
        compat.leave_signals_alone(self)
        self._follower.follow(self)

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        **others: Any,
    ) -> None:
        """Train, from where the run was."""
        if ckpt_path is not None:
            raise ConfigError("Trainer.fit(ckpt_path=...): remove it; a run resumes by itself")
        if not isinstance(model, pytorch.LightningModule):
            raise ConfigError(
                f"Trainer.fit(model): {type(model).__name__} is no LightningModule of {pytorch.__name__}; a script "
                "with `import pytorch_lightning` imports that before laststep.frameworks.lightning"
            )
        if isinstance(train_dataloaders, StepLoader):
            train_dataloaders = self._follower.adopt(self, train_dataloaders)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, **others)


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments with which a run would not resume exactly."""
    strategy = arguments.get("strategy", "auto")
    shards = isinstance(strategy, pytorch.strategies.ModelParallelStrategy)
    if not shards and (not isinstance(strategy, str) or strategy not in DDP):
        raise ConfigError(
            f"Trainer(strategy={strategy!r}): choose one of {', '.join(DDP)}, or a ModelParallelStrategy with "
            "tensor_parallel_size=1, in whose configure_model() fully_shard shards the model"
        )
    if arguments.get("max_time") is not None:
        raise ConfigError("Trainer(max_time=...): a run that ends by the clock cannot be repeated; use max_steps")
    if arguments.get("reload_dataloaders_every_n_epochs"):
        raise ConfigError("Trainer(reload_dataloaders_every_n_epochs=...): remove it; a run has one order of samples")
    if arguments.get("max_epochs") == -1 and arguments.get("max_steps", -1) == -1:
        raise ConfigError("Trainer(max_epochs=-1): a run needs an end; give max_epochs or max_steps")


class _Strategy(pytorch.strategies.DDPStrategy):
    """Lightning's DDP, on nodes that may have different numbers of ranks."""

    def __init__(self, run: Run, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._of_run = run

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._of_run.size, "rank": self._of_run.rank}


class _Follower(pytorch.Callback):
    """Follows Lightning's loop: registers what it trains, and marks where each step and each epoch ends."""

    steps: FrameworkSteps  # once Lightning has its data

    def __init__(self, run: Run) -> None:
        self._run = run
        self._metrics: dict[str, Any] = {}  # before a validation
        self._validated: dict[str, float] = {}  # what validations have found, by rank 0

    def without_checkpoints(self, callbacks: list[Any]) -> list[Any]:
        """The callbacks but those that save checkpoints, whose files would differ after a resume. Says so."""
        kept = [each for each in callbacks if not isinstance(each, pytorch.callbacks.Checkpoint)]
        for name in dict.fromkeys(type(each).__name__ for each in callbacks if each not in kept):
            loop_of(self._run).engine.progress.say(
                f"WARNING: {name} is left out, as Laststep saves; for its files: checkpoint.best_by, laststep export"
            )
        return kept

    def follow(self, trainer: Any) -> None:
        """Follow the loop of this trainer."""
        loop = trainer.fit_loop.epoch_loop
        self._validate = advance_end = loop.on_advance_end  # a validation, if one is due

        def on_advance_end(fetcher: Any) -> None:
            if self.steps.last_of_epoch:
                self.steps.end_epoch()
            advance_end(fetcher)
            if not loop.done:
                self.steps.end_step()  # now, since Lightning waits for the other ranks before it asks for a batch

        loop.on_advance_end = on_advance_end
        compat.replace_lightning_loaders(
            trainer, lambda loader: self.adopt(trainer, loader), lambda loader: FrameworkValidation(self._run, loader)
        )

    def adopt(self, trainer: Any, loader: Any) -> FrameworkSteps:
        """The steps over this loader, for Lightning to iterate over. Raises ConfigError."""
        if isinstance(loader, FrameworkSteps):
            return loader
        if hasattr(self, "steps"):
            raise ConfigError("Trainer.fit(...): trains from one loader, once; draw from others by run.batches(...)")
        plan = lambda: _plan(trainer, self.steps)  # noqa: E731
        self.steps = FrameworkSteps(self._run, adopted(self._run, loader), plan, trainer.accumulate_grad_batches)
        self.steps.at_resumed_end = lambda: self._validate(compat.lightning_fetcher(trainer))
        return self.steps

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.callbacks = self.without_checkpoints(trainer.callbacks)  # those of the module's configure_callbacks()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _warn_of_own_state(self._run, trainer, pl_module)
        objects: dict[str, Any] = {"model": trainer.strategy.model, **dict(_averages(trainer.callbacks))}
        objects["lightning"] = _Progress(trainer, self._validated)
        optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
        objects |= {_numbered("optimizer", n, optimizers): optimizer for n, optimizer in enumerate(optimizers)}
        for number, config in enumerate(configs):
            if isinstance(config.scheduler, ReduceLROnPlateau) and config.interval == "step":
                raise ConfigError("configure_optimizers(): ReduceLROnPlateau needs interval='epoch'")
            objects[_numbered("scheduler", number, configs)] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            objects["scaler"] = scaler
        if isinstance(trainer.strategy, pytorch.strategies.DDPStrategy):
            rehearse_without_forward(trainer.strategy.model)
        loop_of(self._run).register(objects, rehearses=False)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        batches = self.steps.accumulate
        self._run.log(loss=loss if batches == 1 else batches * loss.detach())  # Lightning has divided it

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._metrics = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        found = trainer.callback_metrics.items()
        new = {name: value for name, value in found if value is not self._metrics.get(name)}
        self._run.log(**new)
        values = torch.tensor([float(new[name]) for name in sorted(new)], device=self._run.device, dtype=torch.float64)
        loop_of(self._run).group.broadcast([values])
        self._validated.update(zip(sorted(new), values.tolist()))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.steps.end_epoch()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, LeaveFunction):
            raise exception  # Lightning would move the model and the optimiser, which a rescue is about to read


class _Progress:
    """Where Lightning's loop is, the state of its callbacks, and the validations' metrics, which these may ask for."""

    def __init__(self, trainer: Any, validated: dict[str, float]) -> None:
        self._trainer, self._validated = trainer, validated

    def _counters(self) -> dict[str, Any]:
        fit, steps = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        return {
            "epochs": fit.epoch_progress,
            "batches": steps.batch_progress,
            "schedulers": steps.scheduler_progress,
            "optimizers": steps.automatic_optimization.optim_progress,
            "manual": steps.manual_optimization.optim_step_progress,
            "validation": steps.val_loop.batch_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        state = {name: counter.state_dict() for name, counter in self._counters().items()}
        callbacks = {each.state_key: _state_of(each) for each in self._trainer.callbacks}
        state["callbacks"] = {name: kept for name, kept in callbacks.items() if kept}
        state["validated"] = dict(self._validated)
        return {**state, "stepped": compat.get_lightning_steps(self._trainer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, counter in self._counters().items():
            counter.load_state_dict(state[name])
        compat.set_lightning_steps(self._trainer, state["stepped"])
        for callback in self._trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key] | _weights_of(callback))
        self._validated.update(state["validated"])
        device = self._trainer.strategy.root_device
        metrics = {name: torch.tensor(value, device=device) for name, value in self._validated.items()}
        self._trainer.callback_metrics.update(metrics)
        fetcher = compat.lightning_fetcher(self._trainer)
        if fetcher is None:  # Lightning's loop has not begun: let it begin the epoch
            epochs = self._trainer.fit_loop.epoch_progress
            for count in (epochs.total, epochs.current):
                count.ready = count.started = count.processed
        else:
            fetcher.fetched = state["batches"]["current"]["ready"]


AVERAGE = "average_model_state"  # in the state of StochasticWeightAveraging


def _averages(callbacks: list[Any]) -> Iterator[tuple[str, nn.Module]]:
    """The averaged models of callbacks, EMA's and SWA's, which Lightning keeps outside of their state or copies."""
    models: list[nn.Module] = []
    models += [each for callback in callbacks for each in vars(callback).values() if isinstance(each, AveragedModel)]
    models += [
        _swa_model(callback)
        for callback in callbacks
        if isinstance(callback, pytorch.callbacks.StochasticWeightAveraging)
    ]
    for number, model in enumerate(models):
        yield _numbered("average", number, models), model


def _swa_model(callback: Any) -> nn.Module:
    model: nn.Module = compat.lightning_swa_model(callback)
    return model


def _state_of(callback: Any) -> dict[str, Any]:
    """The state of a callback, without a model that is registered by itself."""
    state: dict[str, Any] = {name: value for name, value in callback.state_dict().items() if name != AVERAGE}
    for name, value in state.items():
        if isinstance(value, dict):  # SWA's schedule counts its function among its state
            state[name] = {key: part for key, part in value.items() if not callable(part)}
    return state


def _weights_of(callback: Any) -> dict[str, Any]:
    """What `_state_of` has left out, as it is now."""
    if not isinstance(callback, pytorch.callbacks.StochasticWeightAveraging):
        return {}
    return {AVERAGE: {name: value.clone() for name, value in _swa_model(callback).state_dict().items()}}


def _plan(trainer: Any, data: FrameworkSteps) -> tuple[int, int | None]:
    """The number of epochs, and the number of steps or None, as they are known when Lightning's loop has begun. Raises
    ConfigError."""
    epochs, steps = trainer.fit_loop.max_epochs, trainer.max_steps
    if data.accumulate > 1 and trainer.num_training_batches != len(data):
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={data.accumulate}): cannot be combined with limit_train_batches, "
            "overfit_batches or fast_dev_run"
        )
    if steps == -1 or not trainer.lightning_module.automatic_optimization:
        return epochs, None
    needed = math.ceil(steps / math.ceil(trainer.num_training_batches / data.accumulate))
    return needed if epochs == -1 else min(epochs, needed), steps


def _numbered(name: str, number: int, among: list[Any]) -> str:
    return name if len(among) == 1 else f"{name}{number}"


def _warn_of_own_state(run: Run, trainer: Any, module: Any) -> None:
    """Say what keeps a state that only a checkpoint of Lightning's own would hold."""
    for each, plain in [
        (module, pytorch.LightningModule),
        *((callback, pytorch.Callback) for callback in trainer.callbacks),
    ]:
        if type(each).on_save_checkpoint is not plain.on_save_checkpoint and not list(_averages([each])):
            loop_of(run).engine.progress.say(
                f"WARNING: {type(each).__name__}.on_save_checkpoint() is not called; keep that state in buffers, or in "
                "a callback's state_dict()"
            )

"""The Trainer of transformers, resumed exactly: `from laststep.frameworks.transformers import train`, and
`train(run, trainer)` instead of `trainer.train()`.

transformers keeps its own loop. It takes its batches from the data set and the collator of its own loader, in the
order of `run.loader`, so that nothing is fetched in advance. A resumed run starts the loop at the right epoch by the
step that a checkpoint of theirs would name. The steps of that epoch that are done have no batches.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.frameworks import unusable
from laststep.frameworks.steps import FrameworkSteps, FrameworkValidation
from laststep.loops.run import Run, loop_of

try:
    import accelerate  # noqa: F401  transformers' Trainer needs it
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise unusable(__name__, error) from error

STATE = ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step")
# Settings with which a run would not resume exactly. `enable_jit_checkpoint` takes SIGTERM for a checkpoint of theirs.
USUAL = {
    "auto_find_batch_size": False,
    "dataloader_drop_last": False,
    "deepspeed": None,
    "enable_jit_checkpoint": False,
}
NOT_LOGGED = ("epoch", "_runtime", "_per_second", "_preparation_time")  # of an evaluation: what the clock says


def train(run: Run, trainer: Any) -> Any:
    """`trainer.train()`, from where the run was; returns what that returns.

    Call it once. Raises ConfigError for settings that would keep a run from resuming exactly.
    """
    _refuse(trainer)
    args, theirs = trainer.args, trainer.get_train_dataloader()
    if not hasattr(theirs.dataset, "__len__"):
        raise ConfigError("transformers.Trainer(train_dataset=...): needs a data set that has a length")
    loader = run.loader(
        theirs.dataset, args.train_batch_size * run.size, args.dataloader_num_workers, collate_fn=theirs.collate_fn
    )
    steps = FrameworkSteps(run, loader, lambda: (trainer.state.num_train_epochs, trainer.state.max_steps))
    trainer.get_train_dataloader = lambda: steps
    evaluation = trainer.get_eval_dataloader
    trainer.get_eval_dataloader = lambda *data: FrameworkValidation(run, evaluation(*data))
    step = trainer.training_step

    def training_step(*words: Any, **more: Any) -> Any:
        loss = step(*words, **more)
        run.log(loss=loss)
        return loss

    trainer.training_step = training_step
    compat.load_no_transformers_checkpoint(trainer)
    trainer.add_callback(_Follower(run, trainer, steps))
    args.save_strategy, args.ignore_data_skip = "no", True
    position = loop_of(run).engine.position
    if not position.step:
        return trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        # The step before the last of an epoch whose steps are over: its evaluation is still to come.
        done = min(position.step, (position.epoch + 1) * len(steps) - 1)
        state = TrainerState(global_step=done, train_batch_size=args.train_batch_size)
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(steps))
        state.compute_steps(args, total)
        state.save_to_json(str(Path(folder, "trainer_state.json")))
        return trainer.train(resume_from_checkpoint=folder)


def _refuse(trainer: Any) -> None:
    """Raise ConfigError for settings with which a run would not resume exactly."""
    args = trainer.args
    if args.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}): a step is one batch; "
            "use 1, and a larger per_device_train_batch_size"
        )
    if args.load_best_model_at_end:
        raise ConfigError(
            "TrainingArguments(load_best_model_at_end=True): no checkpoint of transformers is saved; use "
            "checkpoint.keep_best, and load_weights(run, best=True) after the run"
        )
    for name, usual in USUAL.items():
        if (given := getattr(args, name, None)) not in (usual, None):
            raise ConfigError(f"TrainingArguments({name}={given!r}): use {usual}")
    if args.fsdp:
        raise ConfigError(f"TrainingArguments(fsdp={args.fsdp!r}): sharded models cannot be registered; use DDP")
    order = (
        "group_by_length" if getattr(args, "group_by_length", False) else getattr(args, "train_sampling_strategy", "")
    )
    if order not in ("", "random"):
        raise ConfigError(f"TrainingArguments: {order} gives another order of samples; Laststep's is random")


class _Follower(TrainerCallback):
    """Follows the Trainer's loop: registers what it trains, and marks where each step and each epoch ends."""

    def __init__(self, run: Run, trainer: Any, steps: FrameworkSteps) -> None:
        self._run, self._trainer, self._steps = run, trainer, steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        if self._run.size > 1 and not isinstance(trainer.model_wrapped, DistributedDataParallel):
            hint = "; on CPUs, set TrainingArguments(use_cpu=True)" if self._run.device.type == "cpu" else ""
            raise ConfigError(f"transformers.Trainer does not train with DistributedDataParallel{hint}")
        objects = {"model": trainer.model_wrapped, "optimizer": trainer.optimizer.optimizer}
        objects |= {"scheduler": trainer.lr_scheduler, "transformers": _Progress(trainer)}
        if trainer.accelerator.scaler is not None:
            objects["scaler"] = trainer.accelerator.scaler
        loop_of(self._run).register(objects)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / len(self._steps)  # the Trainer counts from where the attempt began
        over = control.should_training_stop or control.should_epoch_stop or self._steps.last_of_epoch
        if not control.should_evaluate and not over:
            self._steps.end_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps.resumed_over:  # the Trainer stops after an epoch without a batch
            control.should_training_stop = state.global_step >= state.max_steps
        self._steps.end_epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        self._run.log(**{name: value for name, value in metrics.items() if not name.endswith(NOT_LOGGED)})


class _Progress:
    """The state of the Trainer and of its callbacks, without its log: that has times, which differ between ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def _callbacks(self) -> list[ExportableState]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self._trainer.state, name) for name in STATE}
        return {**state, "callbacks": json.dumps([each.state()["attributes"] for each in self._callbacks()])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self._trainer.state, name, state[name])
        for callback, attributes in zip(self._callbacks(), json.loads(state["callbacks"])):
            vars(callback).update(attributes)

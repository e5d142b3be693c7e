"""The Trainer of transformers, and any subclass such as TRL's, resumed exactly: `from laststep.frameworks.transformers
import follow`, and `follow(run, trainer)` before `trainer.train()`.

transformers keeps its own loop. It takes its batches from the data set and the collator of its own loader, in the
order of `run.loader`, so that none is fetched before the step before it is done. A resumed run starts the loop at the
right step by what a checkpoint of theirs would name; the batches that are done are not drawn again.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections import deque
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.frameworks import unusable
from laststep.frameworks.steps import FrameworkSteps, FrameworkValidation
from laststep.loops.digest import BaseWeights
from laststep.loops.registered import unwrapped
from laststep.loops.run import Run, loop_of

try:
    import accelerate  # noqa: F401  transformers' Trainer needs it
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import SaveStrategy
except ImportError as error:
    raise unusable(__name__, error) from error

STATE = ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step")
# Settings with which a run would not resume exactly. `enable_jit_checkpoint` takes SIGTERM for a checkpoint of theirs.
USUAL = {
    "auto_find_batch_size": False,
    "deepspeed": None,
    "enable_jit_checkpoint": False,
}
NOT_LOGGED = ("epoch", "_runtime", "_per_second", "_preparation_time")  # of an evaluation: what the clock says


def follow(run: Run, trainer: Any) -> None:
    """Have `trainer.train()` train from where the run was. Raises ConfigError for settings that would keep a run from
    resuming exactly."""
    _refuse(trainer)
    trainer.train = functools.partial(train, run, trainer)


def train(run: Run, trainer: Any, resume_from_checkpoint: Any = None, **others: Any) -> Any:
    """`trainer.train()`, from where the run was; returns what that returns.

    Call it once. Raises ConfigError for settings that would keep a run from resuming exactly.
    """
    if resume_from_checkpoint:
        raise ConfigError("trainer.train(resume_from_checkpoint=...): remove it; a run resumes by itself")
    _refuse(trainer)
    their_train = functools.partial(type(trainer).train, trainer, **others)
    args, theirs = trainer.args, trainer.get_train_dataloader()
    if not hasattr(theirs.dataset, "__len__"):
        raise ConfigError("transformers.Trainer(train_dataset=...): needs a data set that has a length")
    loader = run.loader(
        theirs.dataset,
        args.train_batch_size * run.size,
        args.dataloader_num_workers,
        theirs.collate_fn,
        drop_last=args.dataloader_drop_last,
    )
    plan = lambda: (trainer.state.num_train_epochs, trainer.state.max_steps)  # noqa: E731
    steps = FrameworkSteps(run, loader, plan, args.gradient_accumulation_steps)
    trainer.get_train_dataloader = lambda: steps
    evaluation = trainer.get_eval_dataloader
    trainer.get_eval_dataloader = lambda *data: FrameworkValidation(run, evaluation(*data))
    draw = trainer.get_batch_samples  # all batches of a step before the first is trained
    trainer.get_batch_samples = lambda batches, *words: draw(steps.next_step(batches), *words)
    compat.load_no_transformers_checkpoint(trainer, steps)
    trainer.add_callback(_Follower(run, trainer, steps))
    engine = loop_of(run).engine
    if args.save_strategy != SaveStrategy.NO:
        given = args.save_strategy.value
        engine.progress.say(f"save_strategy={given} is off, as Laststep saves; for files: laststep export")
    args.save_strategy, args.ignore_data_skip = SaveStrategy.NO, False
    position = engine.position
    if not position.step:
        return their_train()
    with tempfile.TemporaryDirectory() as folder:
        # The step before the last of an epoch whose steps are over: its evaluation is still to come.
        done = min(position.step, (position.epoch + 1) * steps.steps_per_epoch - 1)
        state = TrainerState(global_step=done, train_batch_size=args.train_batch_size)
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps.steps_per_epoch)
        state.compute_steps(args, total)
        state.save_to_json(str(Path(folder, "trainer_state.json")))
        return their_train(resume_from_checkpoint=folder)


def _refuse(trainer: Any) -> None:
    """Raise ConfigError for settings with which a run would not resume exactly."""
    args = trainer.args
    for name, usual in USUAL.items():
        if (given := getattr(args, name, None)) not in (usual, None):
            raise ConfigError(f"TrainingArguments({name}={given!r}): use {usual}")
    order = (
        "group_by_length" if getattr(args, "group_by_length", False) else getattr(args, "train_sampling_strategy", "")
    )
    if order not in ("", "random"):
        raise ConfigError(f"TrainingArguments: {order} gives another order of samples; Laststep's is random")


class _Follower(TrainerCallback):
    """Follows the Trainer's loop: registers what it trains, and marks where each step and each epoch ends."""

    def __init__(self, run: Run, trainer: Any, steps: FrameworkSteps) -> None:
        self._run, self._trainer, self._steps = run, trainer, steps
        self._own = _OwnValues(run, trainer)
        self._best: _BestWeights | None = None
        self._loss: Tensor | float = 0.0  # of the open step so far
        step = trainer.training_step

        def training_step(*words: Any, **more: Any) -> Any:
            loss = step(*words, **more)
            self._loss = self._loss + loss  # the Trainer has divided it by the batches of the step
            run.log(loss=self._loss)
            return loss

        trainer.training_step = training_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loss = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        model = trainer.model_wrapped
        averages = isinstance(model, DistributedDataParallel) or trainer.is_fsdp_enabled
        if self._run.size > 1 and not averages:
            hint = "; on CPUs, set TrainingArguments(use_cpu=True)" if self._run.device.type == "cpu" else ""
            raise ConfigError(f"transformers.Trainer does not train with DistributedDataParallel{hint}")
        objects = {"model": model, "optimizer": trainer.optimizer.optimizer}
        objects |= {"scheduler": trainer.lr_scheduler, "transformers": _Progress(trainer, self._own)}
        if trainer.accelerator.scaler is not None:
            objects["scaler"] = trainer.accelerator.scaler
        if getattr(args, "sync_ref_model", False):  # TRL's: the model to which it compares follows the trained one
            objects["reference"] = trainer.ref_model
        if adapters := set(getattr(trainer.model, "peft_config", None) or ()):
            whole = unwrapped(model)
            exported = _names_in_adapter_file(whole, adapters)
            objects["base"] = BaseWeights(whole, adapters, exported, loop_of(self._run).group)
        if args.load_best_model_at_end:
            self._best = objects["best"] = _BestWeights(trainer.model)
            compat.on_best_transformers_metric(trainer, self._best.keep)
        loop_of(self._run).register(objects)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._best is not None:
            self._best.put_back()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.store_flos()  # which each rank counts for itself until then
        self._own.leave_out_differing()
        over = control.should_training_stop or control.should_epoch_stop or self._steps.last_of_epoch
        if not control.should_evaluate and not over:
            self._steps.end_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps.resumed_over:  # the Trainer stops after an epoch without a batch
            control.should_training_stop = state.global_step >= state.max_steps
        self._steps.end_epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        self._run.log(**{name: value for name, value in metrics.items() if not name.endswith(NOT_LOGGED)})


def _names_in_adapter_file(model: nn.Module, adapters: set[str]) -> dict[str, str]:
    """The names that PEFT gives the tensors of the adapter that is trained, in adapter_model.safetensors, by those in
    the model. Empty where a file of PEFT's holds other tensors than the model, or there are several such adapters."""
    from peft import PeftModel, get_peft_model_state_dict

    parts = [name.split(".") for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = {part for each in parts for part in each} & adapters
    if len(trained) != 1:
        return {}
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in state.items()}
    theirs = get_peft_model_state_dict(model, state, trained.pop(), save_embedding_layers=False)
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."
    known = all(id(tensor) in names for tensor in theirs.values())
    return {names[id(tensor)]: prefix + name for name, tensor in theirs.items()} if known else {}


class _BestWeights(nn.Module):
    """The weights of the best evaluation so far, for load_best_model_at_end: parameters that no optimiser updates, so a
    checkpoint and a rescue have them as they have the model's. Frozen weights are left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self._live = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in frozen}
        for name, value in self._live.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(value.detach().clone(), requires_grad=False))

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the weights as they are now."""
        for mine, live in zip(self.parameters(), self._live.values()):
            mine.copy_(live)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the model the weights that were kept."""
        for mine, live in zip(self.parameters(), self._live.values()):
            live.copy_(mine)


class _OwnValues:
    """Numbers that a subclass of the Trainer keeps, such as TRL's counters and the means that it logs: those of its
    attributes that transformers does not know. What differs between ranks is left out, with a warning."""

    def __init__(self, run: Run, trainer: Any) -> None:
        self._run, self._trainer = run, trainer
        codes = [getattr(each, "__code__", None) for each in vars(Trainer).values()]
        known = {name for code in codes if code is not None for name in code.co_names}
        self._names = [name for name, value in vars(trainer).items() if name not in known and _is_plain(value)]
        self._compared = run.size == 1

    def leave_out_differing(self) -> None:
        """After the first step: leave out what is one rank's own. A collective."""
        if self._compared or not self._names:
            return
        self._compared = True
        found = [crc32(json.dumps(value, sort_keys=True).encode()) for value in self.state_dict().values()]
        ranks = loop_of(self._run).group.gather(torch.tensor(found, dtype=torch.int64, device=self._run.device))
        differ = [name for name, *each in zip(self._names, *(rank.tolist() for rank in ranks)) if len(set(each)) > 1]
        if differ:
            self._names = [name for name in self._names if name not in differ]
            loop_of(self._run).engine.progress.say(
                f"WARNING: {type(self._trainer).__name__} has other values on each rank in {', '.join(differ)}: they "
                "begin anew in each attempt"
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: _as_plain(getattr(self._trainer, name)) for name in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._trainer, name, _put(value, getattr(self._trainer, name)))


def _is_plain(value: Any) -> bool:
    """Whether it is a number, text, or a collection of such values."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple, deque)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _as_plain(value: Any) -> Any:
    """A copy of dicts and lists alone."""
    if isinstance(value, dict):
        return {key: _as_plain(each) for key, each in value.items()}
    return [_as_plain(each) for each in value] if isinstance(value, (list, tuple, deque)) else value


def _put(value: Any, live: Any) -> Any:
    """The value in collections of the same types as `live` has, such as defaultdict."""
    if isinstance(live, dict) and isinstance(value, dict):
        kept = {name: _put(each, live.get(name)) for name, each in value.items()}
        live.clear()
        live.update(kept)
        return live
    if isinstance(live, deque):
        return deque(value, live.maxlen)
    return tuple(value) if isinstance(live, tuple) else value


class _Progress:
    """The state of the Trainer and of its callbacks, without its log: that has times, which differ between ranks."""

    def __init__(self, trainer: Any, own: _OwnValues) -> None:
        self._trainer, self._own = trainer, own

    def _callbacks(self) -> list[ExportableState]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self._trainer.state, name) for name in STATE}
        callbacks = json.dumps([each.state()["attributes"] for each in self._callbacks()])
        return {**state, "callbacks": callbacks, "own": self._own.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self._trainer.state, name, state[name])
        for callback, attributes in zip(self._callbacks(), json.loads(state["callbacks"])):
            vars(callback).update(attributes)
        self._own.load_state_dict(state.get("own", {}))

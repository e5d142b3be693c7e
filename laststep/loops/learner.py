"""The learner: what one step does to model, averaged model, optimiser and gradient scaler on this rank."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from laststep import compat
from laststep.checkpoint.files import StateChanged
from laststep.checkpoint.pack import Packed, serialized_structure
from laststep.checkpoint.shards import local_of
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Train
from laststep.data.loader import for_each_tensor
from laststep.data.order import Order, nth_seed, seed_generators, seed_of
from laststep.loops.digest import FingerprintedState
from laststep.loops.gradients import Gradients, Replicated, checkpoint_activations, repeated_blocks
from laststep.loops.initial_weights import Plan, apply_plan
from laststep.loops.shares import shares_of
from laststep.loops.snapshot import (
    DEVICE_S,
    POLL_S,
    Buffers,
    Committed,
    HostSnapshot,
    OptimizerSnapshot,
    Ring,
    StepSnapshot,
    addresses,
)
from laststep.optim.build import clear_gradients, fill_momentum, load_optimizer, loads_in_place, scheduled, take_made
from laststep.ranks.device import DeviceQueue
from laststep.ranks.group import Group
from laststep.ranks.process import run_time
from laststep.ranks.world import Gathered, ShardPlace, shard_place
from laststep.say import say
from laststep.task import Task

VAL = "val"  # the validation set of a Task that has one
PRECISION = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """Everything that a step changes. `learn` and then `update` do one step."""

    def __init__(
        self, config: Config, task: Task, group: Group, total_steps: int, ring: Ring[Any] | None = None
    ) -> None:
        """`ring`, if any, is told where a step may begin to wait for other ranks. A collective. Raises ConfigError."""
        self.config = config
        self.task = task
        self.group = group
        self.device = group.device
        self.total_steps = total_steps
        self.names: list[str] = []  # of the values that a training step measures, the loss first; known after warm_up
        # Of those that validation measures, by validation set, once a batch of it has been measured.
        self.measured: dict[str, list[str]] = {}
        # Whether an update can be done again: its gradients are kept until the device has done it.
        self.keeps_inputs = False
        self._ring = ring

        seed_generators(seed_of("model", config.seed), self.device)
        self.place = shard_place(config.train.sharding, group.world)
        self.model, self.average = prepare_model(task, config, group, self.place)
        check_gradients(self.model, config.task)
        self.shares = shares_of(config.train, group.world)
        self._seeds = [seed_of("steps", config.seed, share) for share in self.shares]
        # The ranks average gradients. In a loss with this weight that is the mean over the global batch, even when a
        # short last batch gives them unequal shares. With train.shares the gradients are added instead.
        self._weight = 1 if config.train.shares else group.world.size
        self.gradients = make_gradients(self.model, group, config, self.place)
        self.buffers = Buffers(self.model, group)
        self.task_state = TaskState(task, config.task, self.place)
        self.optimizer, self.sorted = take_made(task.optimizer(self.model), self.model, config.task)
        self.gradients.adopt(self.optimizer, config.task)
        fill_momentum(self.optimizer)
        self.rates = LearningRates(task, self.optimizer, total_steps)
        self._rates_now: list[float] = []  # of the step under way
        self.dtype = PRECISION[config.train.precision]
        # The range of fp16 is so small that gradients vanish unless the loss is scaled up (Micikevicius et al. 2018).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)

    def learn(self, step: int, batches: Iterable[Any], counts: Sequence[int], samples: int) -> None:
        """Forward and backward passes of one step, on `batches`, of each of which `counts` says how many samples count;
        `samples` is the sum over all ranks. Each of this rank's shares has as many of the batches.

        All collectives of the step happen here. Nothing that a checkpoint holds changes here: `update` does that.
        """
        micro_batches, per_share = zip(batches, counts), len(counts) // len(self.shares)
        waits_in_forward, share_sum = self.gradients.waits_in_forward, self.gradients.share_sum
        for share, seed in enumerate(self._seeds):
            of_share = list(islice(micro_batches, per_share))  # first, as loading may draw random numbers
            seed_generators(nth_seed(seed, step), self.device)
            if share == 0:
                self._rates_now = self.rates.at(step)
            else:
                self.buffers.rewind()
            for number, (batch, count) in enumerate(of_share, 1):
                ends_share = number == per_share
                last = ends_share and share == len(self._seeds) - 1
                if waits_in_forward and share == 0 and number == 1:
                    self._end_work()
                with self.gradients.reducing(last):
                    loss = self._forward(self.gradients.parallel, batch, self.task.step)["loss"]
                    if last and not waits_in_forward:
                        self._end_work()
                    weight = count * self._weight / samples
                    if ends_share:
                        share_sum.end_share(share)
                    self._backward(loss if weight == 1 else loss * weight)
                    share_sum.end_backward()
        if self._ring is not None and self.keeps_inputs:
            self._ring.await_newest()  # before the gradients of this step replace its own
        self.task_state.capture()
        self.buffers.broadcast()
        self.gradients.meet(step, self.scaler, self.optimizer)

    def _end_work(self) -> None:
        if self._ring is not None:
            self._ring.end_work()

    def update(self) -> dict[str, Tensor]:
        """The update of the step. No collectives here: a rank that gets this far finishes even if a peer dies.

        Returns scalars on the device: `loss`, the mean over the global batch; `nonfinite`, 1 if that loss or the
        gradient was not finite, else 0; with optim.clip_norm also `grad_norm`, the norm of the gradient before it was
        clipped. With train.nonfinite=skip, a step whose `nonfinite` is 1 has changed nothing.
        """
        for param_group, lr in zip(self.optimizer.param_groups, self._rates_now):
            param_group["lr"] = lr
        measured = self.gradients.measure(self.scaler, self.optimizer)
        nonfinite = measured["nonfinite"]
        skips = self.config.train.nonfinite == "skip"
        if not (skips and self._skip(nonfinite)):
            self.scaler.step(self.optimizer) if self.scaler.is_enabled() else compat.step(self.optimizer)
        self.scaler.update()
        clear_gradients(self.optimizer)
        self.buffers.commit(nonfinite if skips else None)
        self.task_state.commit()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return measured

    @torch.no_grad()
    def evaluate(self, step: int, position: int, batch: Any, count: int, share: int = 0, of: str = VAL) -> Tensor:
        """What validation measures, summed over the `count` samples that one of this rank's shares has of a batch of
        the validation set `of`; float64 of shape (names,), in the order of `measured[of]`. Raises ConfigError."""
        names = self.measured.get(of)
        if names is not None and not count and not self.gradients.waits_in_forward:
            return torch.zeros(len(names), dtype=torch.float64, device=self.device)
        draw = "validate" if of == VAL else f"validate {of}"
        seed_generators(seed_of(draw, self.config.seed, step, position, self.shares[share]), self.device)
        measured = self._measure(of, batch)
        values = torch.stack([measured[name].double() for name in self.measured[of]])
        return values * count if count else torch.zeros_like(values)

    @contextlib.contextmanager
    def looked_at(self, step: int) -> Iterator[nn.Module]:
        """In this block code of the task looks at the model that was validated after `step`, in evaluation mode. Raises
        ConfigError if it has changed any weights or buffers."""
        live = {"model": self.gradients.state_of(self.model)}
        if self.average is not None:
            live["average"] = self.gradients.state_of(self.average)
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        self.train(False)
        before = FingerprintedState(live)
        seed_generators(seed_of("epoch end", self.config.seed, step), self.device)
        with torch.no_grad():
            yield self.model if self.average is None else self.average.module
        if not before.unchanged() or trained != [parameter.requires_grad for parameter in self.model.parameters()]:
            raise ConfigError(
                f"task={self.config.task}: on_epoch_end(): it has changed the model, which only the steps may change"
            )
        clear_gradients(self.optimizer)
        self.train(True)

    @property
    def validated(self) -> nn.Module:
        """The model that validation measures: the average if there is one."""
        return self.model if self.average is None else self.average

    def train(self, on: bool) -> None:
        """Switch between training and validation."""
        for model in (self.gradients.parallel, self.validated):
            model.train(on)
            if on:
                self.gradients.release(model)

    def _measure(self, of: str, batch: Any) -> dict[str, Tensor]:
        """What the task measures of a batch of the validation set `of`. Raises ConfigError if it returns anything that
        it must not."""
        task, own = self.config.task, type(self.task).validation_step is not Task.validation_step
        output = self._forward(self.validated, batch, self.task.validation_step)
        found = check_output(output, task, "validation_step()" if own else "step(), in validation", needs_loss=not own)
        first = sorted(found, key=lambda name: (name != "loss", name)) if own else self.names
        names = set(self.measured.setdefault(of, first))
        if found != names:
            if own:
                raise ConfigError(f"task={task}: validation_step() returns {_list(found ^ names)} in some batches only")
            only = {"training": names - found, "validation": found - names}
            where = " and ".join(f"{_list(which)} only in {where}" for where, which in only.items() if which)
            raise ConfigError(f"task={task}: step() returns {where}; return the same names in both")
        return output

    def warm_up(self, batch: Any, val_batches: Mapping[str, Any] | None = None) -> None:
        """A throwaway forward and backward pass, in every attempt, before the state is restored.

        DDP changes the layout of its gradient buckets after its first backward pass, and with three ranks or more the
        order of a sum depends on the layout. Without the warm-up, a resumed run would take one step with the first
        layout that the undisturbed run took with the second. It also compiles the model and finds the names of the
        task's metrics. A validation batch of each set of `val_batches` follows: an error there would else come after
        an epoch. Only the buffers and the task's own state change, and are put back. Raises ConfigError for a step that
        does not return what it must.
        """
        task = self.config.task
        seed_generators(0, self.device)
        self.train(True)
        for _ in range(2 if self.config.train.cuda_graphs else 1):  # torch records the second pass
            names = check_output(output := self._forward(self.gradients.parallel, batch, self.task.step), task)
            if not output["loss"].requires_grad:
                raise ConfigError(
                    f"task={task}: step(): the loss does not depend on any trainable parameter of the model"
                )
            self._backward(output["loss"])
            clear_gradients(self.optimizer)
            self.gradients.end_warm_up()
            self.buffers.commit()
        self.names = ["loss", *sorted(names - {"loss"})]
        if val_batches:
            self.train(False)
            for of, val_batch in val_batches.items():
                seed_generators(0, self.device)
                with torch.no_grad():
                    self._measure(of, val_batch)
            self.train(True)
            unread = names.difference({"loss"}, *self.measured.values())
            if unread and self.group.world.rank == 0:
                say(
                    f"WARNING: task={task}: {_list(unread)} of step() is not measured; validation_step() must return it"
                )
        self.task_state.put_back()
        report_cuda_graphs(self.config.train, self.group)

    def state_dict(self) -> dict[str, Any]:
        """The state as the last `update` left it, even if a forward pass has run since. The same on every rank. Holds
        references: copy it to keep it beyond the next step."""
        return self._state_dict(self.buffers.committed, self.optimizer.state_dict(), self.task_state.committed)

    def digested(self) -> dict[str, Any]:
        """`state_dict` without the scaler, which waits for the device when it is asked for its scale."""
        return self._tensors(self.buffers.committed, self.optimizer.state_dict(), self.task_state.committed)

    def hold(self, on_host: Callable[[Tensor], bool]) -> HostSnapshot:
        """What the host holds of the state now, see `HostSnapshot`; the CPU itself changes the tensors that `on_host`
        names."""
        return LearnerSnapshot(self, on_host)

    def _state_dict(self, buffers: Committed, optimizer: dict[str, Any], task: Any) -> dict[str, Any]:
        return {**self._tensors(buffers, optimizer, task), "scaler": self.scaler.state_dict()}

    def _tensors(self, buffers: Committed, optimizer: dict[str, Any], task: Any) -> dict[str, Any]:
        return {
            "model": self.buffers.in_state_dict(self.gradients.state_of(self.model, keep_vars=True), buffers),
            "average": None if self.average is None else self.gradients.state_of(self.average),
            "optimizer": self.gradients.marked(optimizer),
            **({"task": task} if self.task_state.exists else {}),
        }

    def live_state(self) -> dict[str, Any]:
        """The state that a checkpoint can be loaded into, without a copy of it."""
        live = self.state_dict()
        optimizer = live.pop("optimizer")
        return {**live, "optimizer": self.gradients.live(optimizer)} if loads_in_place(self.optimizer) else live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.buffers.snapshot()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        load_optimizer(self.optimizer, self.gradients.local(state["optimizer"]))
        self.scaler.load_state_dict(state["scaler"])
        if "task" in state and self.task_state.exists:
            self.task_state.load(state["task"])
        elif ("task" in state or self.task_state.exists) and self.group.world.rank == 0:
            has, lacks = ("the checkpoint", "the Task") if "task" in state else ("the Task", "the checkpoint")
            say(f"WARNING: task={self.config.task}: {has} has a state of the Task (state_dict), {lacks} has none")

    def start_from(self, plan: Plan) -> None:
        """Begin with what rank 0 plans for "model" and "optimizer"; what that lacks stays as it is. A collective."""
        apply_plan(plan, {"model": self.model}, {"optimizer": self.optimizer}, self.group)
        self.buffers.snapshot()
        if self.average is not None:
            self.average.module.load_state_dict(self.model.state_dict())

    def _forward(self, model: nn.Module, batch: Any, step: Callable[[nn.Module, Any], Any]) -> Any:
        """What `step`, the task's own or that of validation, returns for a batch."""
        batch = self.task.on_device(batch)
        if self.config.train.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # however often the Task calls the model: all of it is one pass
        if self.config.train.channels_last:
            batch = for_each_tensor(channels_last, batch)
        if self.dtype is torch.float32:
            measured = step(model, batch)
        else:
            with torch.autocast(self.device.type, self.dtype):
                measured = step(model, batch)
        return measured

    def _backward(self, loss: Tensor) -> None:
        self.gradients.backward(self.scaler.scale(loss), loss.detach().float())

    def _skip(self, nonfinite: Tensor) -> bool:
        """Whether to leave this step out here and now. A fused optimiser does it by itself: it reads the flag on the
        device, as it does for the scaler, and the CPU does not wait. For any other, the CPU waits."""
        if self.scaler.is_enabled():
            return False
        if compat.reads_found_inf(self.optimizer):
            self.optimizer.found_inf = nonfinite  # type: ignore[attr-defined]
            return False
        return bool(nonfinite)


class LearnerSnapshot:
    """A learner's state. Weights, average and scaler change on the device alone, each in its place."""

    def __init__(self, learner: Learner, on_host: Callable[[Tensor], bool]) -> None:
        self._learner = learner
        self._buffers = learner.buffers.committed
        self._optimizer = OptimizerSnapshot(learner.optimizer, on_host)
        self._addresses = addresses(learner.gradients.in_place)
        self._put_back_inputs = _hold_inputs(learner) if learner.keeps_inputs else None
        self._task = learner.task_state.committed

    @property
    def state(self) -> dict[str, Any]:
        """The state: references."""
        return self._learner._state_dict(self._buffers, self._optimizer.state_dict(), self._task)

    def unchanged(self) -> bool:
        """Whether these are still the tensors of that state."""
        return self._addresses == addresses(self._learner.gradients.in_place)

    def put_back(self) -> bool:
        """Give the host back what it held right before an update, so that `update` can do it once more. False if it
        cannot: then nothing has changed."""
        if self._put_back_inputs is None or self._buffers.elsewhere:  # which the host has changed
            return False
        if not self._optimizer.can_put_back() or not self.unchanged():
            return False
        self._optimizer.put_back()
        self._learner.buffers.committed = self._buffers
        self._learner.task_state.committed = self._task
        self._put_back_inputs()
        return True


def _hold_inputs(learner: Learner) -> Callable[[], None]:
    """Keep what the update of a step needs besides the state, as the host has it right before. Returns what puts it
    back."""
    rates, received, captured = learner._rates_now, learner.buffers.received, learner.task_state.captured
    average_is_empty = learner.average is not None and learner.average.is_empty
    put_back_gradients = learner.gradients.hold()

    def put_back() -> None:
        learner._rates_now, learner.buffers.received, learner.task_state.captured = rates, received, captured
        if learner.average is not None:
            learner.average.is_empty = average_is_empty
        put_back_gradients()

    return put_back


class TaskState:
    """The state of a Task of its own, from its `state_dict`. As with `Buffers`, a forward pass may change what is live,
    and a checkpoint holds the copy that the last step, or the last end of an epoch, has committed."""

    def __init__(self, task: Task, name: str, place: ShardPlace) -> None:
        """`name` is the task's, for messages. Raises ConfigError for a state that a checkpoint cannot hold."""
        self._task, self._name = task, name
        saves = type(task).state_dict is not Task.state_dict
        if saves != (type(task).load_state_dict is not Task.load_state_dict):
            there, missing = ("", "load_") if saves else ("load_", "")
            raise ConfigError(f"task={name}: defines {there}state_dict() without {missing}state_dict(); define both")
        self.exists = saves
        # In a checkpoint: the state `now`, and before the end of an epoch that has been `cut`.
        self.committed: Any = None
        self.captured: Any = None
        if not saves:
            return
        self.capture()
        self.commit()
        try:
            serialized_structure(Packed({"task": self.committed}, place).structure)
        except Exception as error:  # pickle and torch.load raise many kinds
            raise ConfigError(
                f"task={name}: state_dict(): a checkpoint cannot hold it; return plain values, tensors, lists, dicts"
            ) from error

    def capture(self, cuts_epoch: bool = False) -> None:
        """Copy the live state, to be committed by `commit`. `cuts_epoch`: it follows the end of an epoch that the end
        of the run has cut short, and that is reopened if the run is continued."""
        if self.exists:
            self.captured = {"now": self.live(), "cut": self.committed["now"] if cuts_epoch else None}

    def commit(self) -> None:
        """What was captured is part of the state from now on."""
        self.committed = self.captured

    def put_back(self) -> None:
        """Undo what has changed since the last `commit`."""
        if self.exists:
            self.load(self.committed)

    def reopen_epoch(self) -> None:
        """Go back to before the end of the epoch that was cut short."""
        if self.exists and self.committed["cut"] is not None:
            self.load({"now": self.committed["cut"]})

    def load(self, state: Any) -> None:
        """Restore what `committed` was. Raises ConfigError."""
        try:
            self._task.load_state_dict(copy.deepcopy(state["now"]))
        except Exception as error:  # it is the user's
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(f"task={self._name}: load_state_dict() does not take its own state: {reason}") from error
        self.captured = self.committed = {"cut": None, **state, "now": self.live()}

    def live(self) -> Any:
        """A copy of the state as it is now; None if there is none."""
        return copy.deepcopy(self._task.state_dict()) if self.exists else None


class Average(AveragedModel):
    """torch's AveragedModel, bit for bit, without a wait for the device.

    torch keeps the counter on the CPU and copies it to the device in each update, where an exponential average ignores
    it. Here it is on the device, so it also counts only the updates that the device has done.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device | None) -> None:
        super().__init__(model, device, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.requires_grad_(False)
        self._update = get_ema_multi_avg_fn(decay)
        self.is_empty = True  # whether the counter is 0

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the model as it is now. The first one is copied."""
        own, others = _tensors(self.module), _tensors(model)
        if self.is_empty:
            for averaged, tensor in zip(own, others):
                averaged.copy_(tensor)
        else:
            by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
            for averaged, tensor in zip(own, others):
                pair = by_dtype.setdefault(averaged.dtype, ([], []))
                pair[0].append(averaged)
                pair[1].append(tensor)
            for averaged_group, group in by_dtype.values():
                self._update(averaged_group, group, self.n_averaged)
        self.is_empty = False
        self.n_averaged += 1

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch does it; an average that is loaded is not empty."""
        result = super().load_state_dict(state_dict, strict, assign)
        self.is_empty = bool(self.n_averaged == 0)
        return result


def _tensors(module: nn.Module) -> list[Tensor]:
    """Its weights and buffers; of those that are sharded, what this rank holds."""
    return [local_of(tensor) for tensor in (*module.parameters(), *module.buffers())]


class LearningRates:
    """Each group's initial learning rate times the task's schedule: a pure function of the step, so no checkpoint holds
    it."""

    def __init__(self, task: Task, optimizer: Optimizer, total_steps: int) -> None:
        """The optimiser is new: its groups have their initial learning rates."""
        self._task, self._optim = task, task.config.optim
        self._is_default = getattr(task.schedule, "__func__", None) is Task.schedule
        self._initial = [float(group["lr"]) for group in optimizer.param_groups]
        self._total = total_steps

    def at(self, step: int) -> list[float]:
        """The learning rate of each group at `step` (from 0). Raises ConfigError when the schedule gives none."""
        if self._is_default:  # not by its factor, which would round once more
            return [scheduled(lr, self._optim, step, self._total) for lr in self._initial]
        value: Any = self._task.schedule(step, self._total)
        try:
            factor = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            factor = math.nan
        if not 0 <= factor < math.inf:
            raise ConfigError(
                f"task={self._task.config.task}: schedule({step}, {self._total}) returned {value!r}; "
                "it must return a finite number, at least 0"
            )
        return [lr * factor for lr in self._initial]


def prepare_model(task: Task, config: Config, group: Group, place: ShardPlace) -> tuple[nn.Module, Average | None]:
    """The task's model on its device, as `config` asks for it, and its moving average if there is one. Where they are
    sharded, this is a collective. Raises ConfigError."""
    if place.shards > 1:
        return _sharded(task, config, group, place)
    train, device = config.train, group.device
    model = task.model().to(device)
    if train.channels_last:
        model.to(memory_format=torch.channels_last)
    average = Average(model, train.ema_decay, device) if train.ema_decay else None
    if train.activation_checkpointing:
        checkpoint_activations(model, train.compile)
    if train.compile:
        if train.cuda_graphs:
            compat.compile_whole_under_ddp()  # fewer launches; and each forward pass is one graph, as torch expects
        compat.compile_in_place(model, "reduce-overhead" if train.cuda_graphs else None)
    return model, average


def _sharded(task: Task, config: Config, group: Group, place: ShardPlace) -> tuple[nn.Module, Average | None]:
    """The same; only rank 0 has memory for more than its shards, until the others have got theirs."""
    from laststep.loops.sharded import build, shard  # takes a second to import

    train, device, seed = config.train, group.device, seed_of("model", config.seed)
    model, values = build(task.model, lambda: seed_generators(seed, device), group.world.rank)
    average = Average(model, train.ema_decay, None) if train.ema_decay else None
    models = [model] if average is None else [model, average.module]
    if values is not None:
        values.note(models)
    if train.activation_checkpointing:
        checkpoint_activations(model, train.compile)
    if train.compile:
        for block in repeated_blocks(model):  # one compiled part would gather all weights at once
            compat.compile_in_place(block)
    shard(models, task, config, group, place)
    if values is not None:
        values.fill(models, group)
    if average is not None:
        average.n_averaged = average.n_averaged.to(device)
    return model, average


def make_gradients(model: nn.Module, group: Group, config: Config, place: ShardPlace) -> Gradients:
    """Those of a model that is replicated, or has been sharded. A collective."""
    if place.shards == 1:
        return Replicated(model, group, config)
    from laststep.loops.sharded import Sharded

    return Sharded(model, group, config, place)


def check_gradients(model: nn.Module, task: str) -> None:
    """Raise ConfigError unless this model of `task` has gradients, and only dense ones."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"task={task}: no parameter of the model requires a gradient, so none can be trained; "
            "leave some unfrozen in model()"
        )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"task={task}: {name or 'the model'} is an {type(module).__name__} with sparse=True, but sparse "
                "gradients cannot be checked and clipped like others; remove sparse=True"
            )


def report_cuda_graphs(train: Train, group: Group) -> None:
    """After the warm-up: say if torch has left out CUDA graphs that it should have recorded, which it does silently."""
    if train.cuda_graphs and group.world.rank == 0 and not compat.has_cuda_graphs(group.device):
        say(
            "WARNING: train.cuda_graphs=true: torch has recorded no CUDA graphs of this model, or not of all of it; "
            "with TORCH_LOGS=cudagraphs in the environment it says why"
        )


def channels_last(tensor: Tensor) -> Tensor:
    """An image (4 dimensions) as NHWC in memory; any other tensor unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


UPDATE_S = 3 * DEVICE_S  # how long the launches may take, and then the device


class LateUpdate:
    """The update of a step in which a rank's main thread is stuck, done by the thread of a rescue.

    A fault may find ranks of a sharded run one step apart. Some have what all ranks gather at the end of a step, and
    have done its update; another has its gradients, and waits for what they gathered. It can do its update with theirs:

    * One rank that has gathered proves that all ranks have contributed, and they do that with gradients that are
      complete.
    * The rescue has frozen the ring, so the main thread never gets beyond the beginning of an update, even if the
      collective returns after all. Until there it only assigns what it has gathered, which is the same on every rank.
    * All that the update needs is on this rank, and only the update itself changes it.

    On a GPU the host is ahead: it has queued this update behind the collective that hangs, and begun the next step. So
    the gradients are kept until the device has done their update: a rank has those of two steps in memory. In the
    rescue the host is given back what it held before the update, and does it once more, on the stream beside. That is
    safe while the main thread waits for the device, and the device for the collective. Should it go on after all,
    nothing of this rank's state is saved, as the update may have been done twice; and the main thread stops, so that no
    rank can do the next one. The update's kernels have been launched before, so none is loaded now; but an optimiser
    that is not fused allocates, for which a driver may wait for the device. The rescue's deadline ends that.
    """

    def __init__(self, learner: Learner, order: Order, ring: Ring[StepSnapshot], queue: DeviceQueue) -> None:
        self.tried = False
        self._learner, self._order, self._ring, self._queue = learner, order, ring, queue
        if queue.runs_ahead:
            learner.keeps_inputs = True

    @staticmethod
    def helps(learner: Learner, queue: DeviceQueue) -> bool:
        """Whether a rescue may need it. On a GPU it costs memory, which would be in vain if a rank that dies takes its
        shard with it, or if there is a copy of each step."""
        place, settings = learner.place, learner.config.checkpoint
        has_copies = settings.replicas > 0 and settings.replica_every_steps > 1
        return place.shards > 1 and (not queue.runs_ahead or place.replicas > 1 or has_copies)

    def gathered(self, steps: int) -> Gathered | None:
        """What this rank gathered last, for the ranks that did not; on a GPU, in the last of the `steps` steps that the
        device has done."""
        return self._queue.read(lambda: self._learner.gradients.gathered(steps if self._queue.runs_ahead else None))

    def do(self, gathered: Gathered) -> tuple[Mapping[str, Tensor], int] | None:
        """Do the update of this step, after the state that the ring has chosen. Returns what the step measured, and its
        samples; None if it cannot be done: then nothing has changed. Raises StateChanged if the device has gone on, and
        TimeoutError or DeviceSilent if it does not do this update."""
        self.tried = True
        if self._queue.runs_ahead and not self._ring.await_thread(DEVICE_S):
            return None  # it may still change what the update needs
        if not self._ring.is_whole():
            return None  # the device has gone on, and done this update
        if not self._queue.takes_launches:
            return None
        measured = self._queue.launch(lambda: self._update(gathered), UPDATE_S)
        if measured is None:
            return None
        if not self._ring.redo():
            raise StateChanged("the device has gone on meanwhile, and may have done the same update")
        return measured, self._order.count(gathered.step - 1)

    def _update(self, gathered: Gathered) -> Mapping[str, Tensor] | None:
        held = self._ring.held
        if held is not None:
            assert isinstance(held.state, LearnerSnapshot)
            if not held.state.put_back():
                return None
        if not self._learner.gradients.take(gathered):
            return None
        measured = self._learner.update()
        self._await_device()
        return measured

    def _await_device(self) -> None:
        done, deadline = self._queue.event(), run_time() + DEVICE_S
        done.record()
        while not done.query():
            if run_time() > deadline:
                raise TimeoutError(f"the device has not done the update within {DEVICE_S:.0f} s")
            time.sleep(POLL_S)


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def check_output(output: Any, task: str, who: str = "step()", needs_loss: bool = True) -> set[str]:
    """The names of what `who`, a method of a Task, has returned. Raises ConfigError unless that is a dict of tensors of
    one element, with a "loss" if one is needed."""
    says = f"task={task}: {who}"
    if not isinstance(output, Mapping):
        kind = type(output).__name__
        raise ConfigError(f'{says}: must return a dict with a "loss", such as {{"loss": loss}}, not a {kind}')
    if needs_loss and "loss" not in output:
        raise ConfigError(f"{says}: must return a dict with a 'loss', not {[*output]}")
    if not output:
        raise ConfigError(f"{says}: must return a dict with at least one value, not an empty one")
    for name, value in output.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{says}: {name!r} is of type {type(value).__name__}; return a tensor of one element, without .item()"
            )
        if value.numel() != 1:
            raise ConfigError(f"{says}: {name!r} has shape {tuple(value.shape)}; return its mean, {name}.mean()")
    return set(output)

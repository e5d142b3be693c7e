"""The learner: what one step does to model, averaged model, optimiser and gradient scaler on this rank."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer import compat
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.data.loader import for_each_tensor
from trainer.data.order import nth_seed, seed_generators, seed_of
from trainer.loops.buffers import Buffers
from trainer.loops.model_setup import channels_last, data_parallel, prepare_model
from trainer.loops.rates import LearningRates
from trainer.optim.build import check_made, fill_momentum, load_optimizer, loads_in_place
from trainer.task import Task
from trainer.world.group import Group

PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """Everything that a step changes. `learn` and then `update` do one step."""

    def __init__(self, config: Config, task: Task, group: Group, total_steps: int) -> None:
        self.config = config
        self.task = task
        self.group = group
        self.device = group.device
        self.total_steps = total_steps
        self.names: list[str] = []  # of the values that the task measures, the loss first; known after warm_up
        self.busy_s = 0.0  # time spent so far on this rank's own work, which no other rank can slow down

        seed_generators(seed_of("model", config.seed), self.device)
        self.model, self.average = prepare_model(task.model(), config.train, self.device)
        self._steps_seed = seed_of("steps", config.seed, group.world.rank)
        self._loss_tap = nn.Parameter(torch.zeros((), device=self.device))  # see _backward
        self._parameters = list(self.model.parameters())
        self._by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}  # all whose gradients must be finite; the loss too
        for parameter in (self._loss_tap, *self._parameters):
            self._by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._one = torch.ones((), device=self.device)
        self.parallel = data_parallel(self.model, self._loss_tap, group)
        self.buffers = Buffers(self.model, group)
        self.optimizer = task.optimizer(self.model)
        check_made(self.optimizer, self.model, config.task)
        fill_momentum(self.optimizer)
        self.rates = LearningRates(task, self.optimizer, total_steps)
        self.dtype = PRECISION[config.train.precision]
        # The range of fp16 is so small that gradients vanish unless the loss is scaled up (Micikevicius et al. 2018).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)

    def learn(self, step: int, micro_batches: Sequence[tuple[Any, int]], samples: int) -> None:
        """Forward and backward passes of one step, on pairs of a batch and how many of its samples count; `samples` is
        their sum over all ranks.

        All collectives of the step happen here. Nothing that a checkpoint holds changes here: `update` does that.
        """
        seed_generators(nth_seed(self._steps_seed, step), self.device)
        for param_group, lr in zip(self.optimizer.param_groups, self.rates.at(step)):
            param_group["lr"] = lr

        began = time.perf_counter()
        for position, (batch, count) in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self._no_reduction():
                loss = self._forward(self.parallel, batch)["loss"]
                if last:
                    self.busy_s += time.perf_counter() - began
                # DDP averages over ranks. This weight makes that the mean over the global batch, even when a short
                # last batch gives the ranks unequal shares.
                weight = count * self.group.world.size / samples
                self._backward(loss if weight == 1 else loss * weight)
        self.buffers.broadcast()

    def update(self) -> dict[str, Tensor]:
        """The update of the step. No collectives here: a rank that gets this far finishes even if a peer dies.

        Returns scalars on the device: `loss`, the mean over the global batch; `nonfinite`, 1 if that loss or the
        gradient was not finite, else 0; with optim.clip_norm also `grad_norm`, the norm of the gradient before it was
        clipped. With train.nonfinite=skip, a step whose `nonfinite` is 1 has changed nothing.
        """
        measured: dict[str, Tensor] = {}
        if self.config.optim.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            measured["grad_norm"] = self._clip(self.config.optim.clip_norm).float()
        # Infinite gradients are part of fp16, and no fault: the scaler lowers its scale.
        loss_alone = {torch.float32: [self._loss_tap]}
        nonfinite = self._find_nonfinite(loss_alone if self.scaler.is_enabled() else self._by_dtype)
        skips = self.config.train.nonfinite == "skip"
        if not (skips and self._skip(nonfinite)):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.buffers.commit(nonfinite if skips else None)
        if self.average is not None:
            self.average.update_parameters(self.model)
        loss, self._loss_tap.grad = self._loss_tap.grad, None
        assert loss is not None
        # With several ranks the loss lies in a bucket that the next all-reduce overwrites.
        loss = loss if self.parallel is self.model else loss.clone()
        return {"loss": loss, "nonfinite": nonfinite, **measured}

    @torch.no_grad()
    def evaluate(self, step: int, position: int, batch: Any, count: int) -> Tensor:
        """The values that `names` lists, summed over the `count` samples of a validation batch; float64, in the order
        of `names`."""
        if not count:
            return torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        seed_generators(seed_of("validate", self.config.seed, step, position, self.group.world.rank), self.device)
        measured = self._forward(self.validated, batch)
        return torch.stack([measured[name].double() for name in self.names]) * count

    @property
    def validated(self) -> nn.Module:
        """The model that validation measures: the average if there is one."""
        return self.model if self.average is None else self.average

    def train(self, on: bool) -> None:
        """Switch between training and validation."""
        self.parallel.train(on)
        self.validated.train(on)

    def warm_up(self, batch: Any) -> None:
        """A throwaway forward and backward pass, in every attempt, before the state is restored.

        DDP changes the layout of its gradient buckets after its first backward pass, and with three ranks or more the
        order of a sum depends on the layout. Without the warm-up, a resumed run would take one step with the first
        layout that the undisturbed run took with the second. The warm-up also compiles the model and finds the names
        of the task's metrics. It changes no state but the buffers, and puts those back: a copy of the whole state would
        be held just when memory is fullest. Raises ConfigError when the task returns no loss.
        """
        seed_generators(0, self.device)
        self.train(True)
        output = self._forward(self.parallel, batch)
        if "loss" not in output:
            raise ConfigError(f"task={self.config.task}: step() must return a dict with a 'loss', not {list(output)}")
        self.names = ["loss", *sorted(set(output) - {"loss"})]
        self._backward(output["loss"])
        self.optimizer.zero_grad()
        self._loss_tap.grad = None
        self.buffers.commit()

    def state_dict(self) -> dict[str, Any]:
        """The state as the last `update` left it, even if a forward pass has run since. The same on every rank. Holds
        references: copy it to keep it beyond the next step."""
        return {
            "model": self.buffers.in_state_dict(self.model.state_dict(keep_vars=True)),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def live_state(self) -> dict[str, Any]:
        """The state that a checkpoint can be loaded into, without a copy of it."""
        live = self.state_dict()
        if not loads_in_place(self.optimizer):
            del live["optimizer"]
        return live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.buffers.snapshot()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def _forward(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        batch = self.task.on_device(batch)
        if self.config.train.channels_last:
            batch = for_each_tensor(channels_last, batch)
        if self.dtype is torch.float32:
            return self.task.step(model, batch)
        with torch.autocast(self.device.type, self.dtype):
            return self.task.step(model, batch)

    def _backward(self, loss: Tensor) -> None:
        """Backward pass that also makes the loss the gradient of the parameter `_loss_tap`: DDP averages it with the
        other gradients, so every rank knows the loss of every step without a further collective."""
        scaled, plain = self.scaler.scale(loss), loss.detach().float()
        if self.parallel is not self.model:
            torch.autograd.backward([scaled, self._loss_tap], [None, plain])
        else:  # the same, faster
            scaled.backward()
            self._loss_tap.grad = plain if self._loss_tap.grad is None else self._loss_tap.grad + plain

    def _clip(self, limit: float) -> Tensor:
        """Clip the gradient to this norm; returns its norm before. One nonfinite gradient makes all nonfinite. An
        infinite limit leaves the gradient as it is."""
        if math.isinf(limit):
            return nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return nn.utils.clip_grad_norm_(self._parameters, limit)

    def _skip(self, nonfinite: Tensor) -> bool:
        """Whether to leave this step out here and now. A fused optimiser does it by itself: it reads the flag on the
        device, as it does for the scaler, and the CPU does not wait. For any other, the CPU waits."""
        if self.scaler.is_enabled():
            return False
        if compat.reads_found_inf(self.optimizer):
            self.optimizer.found_inf = nonfinite  # type: ignore[attr-defined]
            return False
        return bool(nonfinite)

    def _find_nonfinite(self, parameters: Mapping[torch.dtype, Sequence[nn.Parameter]]) -> Tensor:
        """1.0 if any of their gradients holds an infinity or a NaN, else 0.0; a scalar on the device. Uses GradScaler's
        kernel, which takes a tenth of the time of computing the norm."""
        found = torch.zeros((), device=self.device)
        for same_dtype in parameters.values():
            gradients = [gradient for parameter in same_dtype if (gradient := parameter.grad) is not None]
            compat.note_nonfinite(gradients, found, self._one)
        return found

    def _no_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Keep gradients on the rank: for all micro-batches but the last."""
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return contextlib.nullcontext()

"""The learner: model, averaged model, optimiser and arithmetic of one rank; what one step does to them."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer import compat
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.config.schema import Optim
from trainer.data.loader import for_each_tensor
from trainer.data.order import nth_seed, seed_generators, seed_of
from trainer.loops.buffers import Buffers
from trainer.task import Task
from trainer.world.group import Group

PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """Everything that learning changes."""

    def __init__(self, config: Config, task: Task, group: Group, total_steps: int) -> None:
        self.config = config
        self.task = task
        self.group = group
        self.device = group.device
        self.total_steps = total_steps
        self.names: list[str] = []  # of what the task measures, the loss first; known after warm_up
        self.busy_s = 0.0  # spent so far on this rank's own work, which no other rank can slow down

        seed_generators(seed_of("model", config.seed), self.device)
        self.model = task.model().to(self.device)
        if config.train.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.average = _average(self.model, config.train.ema_decay)
        if config.train.activation_checkpointing:
            _checkpoint_activations(self.model, config.train.compile)
        if config.train.compile:
            # Static shapes: the dynamic ones would depend on the shapes seen before, so on where a run was resumed.
            self.model.compile(dynamic=False)
        self._steps_seed = seed_of("steps", config.seed, group.world.rank)
        self.tap = nn.Parameter(torch.zeros((), device=self.device))
        self._parameters = list(self.model.parameters())
        self._alike: dict[torch.dtype, list[nn.Parameter]] = {}  # by what their gradients are made of; the loss too
        for parameter in (self.tap, *self._parameters):
            self._alike.setdefault(parameter.dtype, []).append(parameter)
        self._one = torch.ones((), device=self.device)
        self.parallel = self._parallel()
        self.buffers = Buffers(self.model, group)
        self.optimizer = _optimizer(self.model, config.optim)
        self.dtype = PRECISION[config.train.precision]
        # fp16 has so small a range that gradients vanish unless the loss is scaled up (Micikevicius et al. 2018).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)

    def learn(self, step: int, micro_batches: Sequence[tuple[Any, int]], samples: int) -> None:
        """Forward and backward of one step on (batch, samples of it that count) pairs, `samples` over all ranks.

        Everything that the ranks do together, and nothing that a checkpoint holds: that is left to `update`.
        """
        seed_generators(nth_seed(self._steps_seed, step), self.device)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = learning_rate(self.config.optim, step, self.total_steps)

        began = time.perf_counter()
        for position, (batch, count) in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self._no_reduction():
                loss = self._forward(self.parallel, batch)["loss"]
                if last:
                    self.busy_s += time.perf_counter() - began
                # DDP averages over ranks; weighted so, what it yields is the mean over the global batch, even when
                # a short last batch gives the ranks unequal shares.
                weight = count * self.group.world.size / samples
                self._backward(loss if weight == 1 else loss * weight)
        self.buffers.share()

    def update(self) -> tuple[Tensor, Tensor]:
        """The update of the step: this rank's alone, so one that comes so far completes it, whoever dies meanwhile.

        Returns the mean loss over the global batch, and 0 where that and the gradient were finite, else 1: scalars on
        the device. Where train.nonfinite=skip, such a step has changed nothing.
        """
        clip_norm, skips = self.config.optim.clip_norm, self.config.train.nonfinite == "skip"
        if self.scaler.is_enabled():
            # Of infinite gradients the scaler makes a smaller scale: a part of fp16, and no fault.
            bad = self._find_inf({torch.float32: [self.tap]})
            if clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self._parameters, clip_norm)
        else:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, clip_norm)  # one that is not finite makes all so
            bad = self._find_inf(self._alike)
            if skips:  # read by the fused optimisers on the device, as for the scaler: the CPU need not wait to know
                self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.buffers.keep(bad if skips else None)
        if self.average is not None:
            self.average.update_parameters(self.model)
        loss, self.tap.grad = self.tap.grad, None
        assert loss is not None
        # Of several ranks it lies where the next all-reduce writes to.
        return loss if self.parallel is self.model else loss.clone(), bad

    @torch.no_grad()
    def evaluate(self, step: int, position: int, batch: Any, count: int) -> Tensor:
        """Sums over the `count` samples of a validation batch of what `names` says, in that order."""
        if not count:
            return torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        seed_generators(seed_of("validate", self.config.seed, step, position, self.group.world.rank), self.device)
        means = self._forward(self.validated, batch)
        return torch.stack([means[name].double() for name in self.names]) * count

    @property
    def validated(self) -> nn.Module:
        """The model that validation measures."""
        return self.model if self.average is None else self.average

    def train(self, on: bool) -> None:
        """Switch between training and validation."""
        self.parallel.train(on)
        self.validated.train(on)

    def warm_up(self, batch: Any) -> None:
        """A throwaway forward and backward, in every attempt, before the state is put in.

        DDP lays out its gradient buckets anew after its first backward pass, and from three ranks on the order of a
        sum depends on the layout. Without this a resumed run would take one step with the first layout that the
        undisturbed run took with the second. It also compiles, and finds the names of the task's metrics. Of the state
        it changes buffers alone, and puts those back: a copy of all would be held when memory is fullest.
        """
        seed_generators(0, self.device)
        self.train(True)
        output = self._forward(self.parallel, batch)
        if "loss" not in output:
            raise ConfigError(f"task={self.config.task}: step() must return a dict with a 'loss', not {list(output)}")
        self.names = ["loss", *sorted(set(output) - {"loss"})]
        self._backward(output["loss"])
        self.optimizer.zero_grad()
        self.tap.grad = None
        self.buffers.keep()

    def state_dict(self) -> dict[str, Any]:
        """All of it as the last `update` left it, whatever a forward pass has done since. References: whoever keeps it
        longer copies it. The same on every rank."""
        return {
            "model": self.buffers.kept_in(self.model.state_dict(keep_vars=True)),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put in what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        self.buffers.restart()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def _forward(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        batch = self.task.on_device(batch)
        if self.config.train.channels_last:
            batch = for_each_tensor(_channels_last, batch)
        if self.dtype is torch.float32:
            return self.task.step(model, batch)
        with torch.autocast(self.device.type, self.dtype):
            return self.task.step(model, batch)

    def _parallel(self) -> nn.Module:
        if self.group.world.size == 1:
            return self.model
        return DistributedDataParallel(
            _Tapped(self.model, self.tap),
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **compat.no_buffer_sync(),  # sharing them is what `Buffers` does
        )

    def _backward(self, loss: Tensor) -> None:
        """The loss rides along with the gradients: it is the gradient of `tap`, so DDP sums it over the ranks too, and
        every rank knows every step's loss without a collective of its own."""
        scaled, own = self.scaler.scale(loss), loss.detach().float()
        if self.parallel is not self.model:
            torch.autograd.backward([scaled, self.tap], [None, own])
        else:  # the same, faster
            scaled.backward()
            self.tap.grad = own if self.tap.grad is None else self.tap.grad + own

    def _find_inf(self, parameters: Mapping[torch.dtype, Sequence[nn.Parameter]]) -> Tensor:
        """1.0 where any of their gradients holds an infinity or a NaN, else 0.0. What GradScaler uses: one kernel, a
        tenth of the time that the norm of them all takes."""
        found = torch.zeros((), device=self.device)
        for alike in parameters.values():
            gradients = [gradient for parameter in alike if (gradient := parameter.grad) is not None]
            compat.note_nonfinite(gradients, found, self._one)
        return found

    def _no_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Gradients of all but the last micro-batch stay on the rank."""
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return contextlib.nullcontext()


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """The learning rate of `step` (from 0), a pure function: linear warm-up, then cosine to 0, or a tenth after each
    third of the way (step), or constant."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    done = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    if optim.schedule == "cosine":
        return optim.lr * 0.5 * (1 + math.cos(math.pi * done))
    if optim.schedule == "step":
        return optim.lr * 0.1 ** int(3 * done)
    return optim.lr


def _optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Fused: those can leave out a step by a flag on the device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optim.name == "adamw":
        return torch.optim.AdamW(parameters, lr=optim.lr, weight_decay=optim.weight_decay, fused=True)
    sgd = torch.optim.SGD(parameters, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay, fused=True)
    if optim.momentum:
        for parameter in parameters:  # else it would be uninitialised memory if the very first step were left out
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


class _Tapped(nn.Module):
    """What DDP wraps: the model and the tap, see Learner._backward."""

    def __init__(self, model: nn.Module, tap: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.tap = tap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def _average(model: nn.Module, decay: float) -> AveragedModel | None:
    """A moving average of weights and buffers."""
    if not decay:
        return None
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    return average.requires_grad_(False)


def _channels_last(tensor: Tensor) -> Tensor:
    """An image (4 dimensions) as NHWC in memory."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _checkpoint_activations(model: nn.Module, compiled: bool) -> None:
    """Recompute the repeated blocks (residual blocks, encoder layers), or else the children, in the backward pass."""
    kinds = Counter(type(m) for m in model.modules() if not type(m).__module__.startswith("torch.nn."))
    blocks = [m for m in model.modules() if kinds[type(m)] > 1]
    inner = {id(m) for block in blocks for m in block.modules() if m is not block}
    chosen = {id(m) for m in blocks or model.children() if id(m) not in inner}
    # Under torch.compile the recomputation is the compiler's, which does not repeat such side effects.
    contexts = None if compiled else lambda: _statistics_once(model)
    compat.checkpoint_activations(model, lambda m: id(m) in chosen, contexts)


def _statistics_once(model: nn.Module) -> tuple[contextlib.AbstractContextManager[None], ...]:
    """Contexts for the forward pass and for its recomputation, in which batch norm must not count a batch again."""

    @contextlib.contextmanager
    def recomputation() -> Iterator[None]:
        norms = [m for m in model.modules() if compat.is_batch_norm(m)]
        before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, batches) in zip(norms, before):
                norm.momentum, norm.num_batches_tracked = momentum, batches

    return contextlib.nullcontext(), recomputation()

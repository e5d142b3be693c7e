"""How the gradients of the ranks meet when each has the whole model: DistributedDataParallel sums them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laststep import compat
from laststep.compat import kernels
from laststep.config.config import Config
from laststep.config.schema import Train
from laststep.loops.finite_check import FiniteCheck
from laststep.loops.shares import AddsShares, ShareSum, shares_of
from laststep.ranks.group import Group, TreeHook
from laststep.ranks.world import Gathered


class Replicated:
    """The gradients of a model that every rank has, and the loss.

    A backward pass also makes the loss the gradient of a parameter, the loss tap: DDP averages it with the other
    gradients, so every rank knows the loss of every step without a further collective.
    """

    waits_in_forward = False

    def __init__(self, model: nn.Module, group: Group, config: Config) -> None:
        """A collective."""
        self._clip_norm = config.optim.clip_norm
        self._loss_tap = nn.Parameter(torch.zeros((), device=group.device))
        self._parameters = list(model.parameters())
        self.summed = [self._loss_tap, *self._parameters]
        self.parallel = data_parallel(model, self._loss_tap, group, config.train)
        self.share_sum: AddsShares = ShareSum(self.summed, len(shares_of(config.train, group.world)))
        self._alone = self.parallel is model
        # With several ranks it lies in a bucket, which the next all-reduce overwrites, as a CUDA graph does its memory.
        self._loss_stays = self._alone and not config.train.cuda_graphs
        in_buckets = not self._alone and lays_in_buckets(config.train, group.device)
        self._finite_check = FiniteCheck(self._loss_tap, self._parameters, in_buckets)

    def adopt(self, optimizer: Optimizer, task: str) -> None:
        """See Gradients."""

    @property
    def in_place(self) -> list[Tensor]:
        """See Gradients."""
        return list(self._parameters)

    def release(self, model: nn.Module) -> None:
        """See Gradients."""

    def state_of(self, model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
        """See Gradients."""
        return model.state_dict(keep_vars=keep_vars)

    def reducing(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """See Gradients. All micro-batches but the last keep their gradients on the rank."""
        if last or not isinstance(self.parallel, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.parallel.no_sync()

    def backward(self, scaled: Tensor, loss: Tensor) -> None:
        """See Gradients."""
        if not self._alone:
            kernels.backward(scaled, self._loss_tap, loss)
        else:  # the same, faster
            kernels.backward(scaled)
            self._loss_tap.grad = loss if self._loss_tap.grad is None else self._loss_tap.grad + loss

    def gathered(self, steps: int | None) -> Gathered | None:
        """See Gradients. Any rank that has done the update can save it for all."""
        return None

    def hold(self) -> Callable[[], None]:
        """See Gradients."""
        return lambda: None

    def meet(self, step: int, scaler: GradScaler, optimizer: Optimizer) -> None:
        """See Gradients. DDP has summed the loss with the gradients."""

    def take(self, gathered: Gathered) -> bool:
        """See Gradients."""
        return False

    def measure(self, scaler: GradScaler, optimizer: Optimizer) -> dict[str, Tensor]:
        """See Gradients."""
        measured: dict[str, Tensor] = {}
        if self._clip_norm is not None:
            scaler.unscale_(optimizer)
            measured["grad_norm"] = _clip(self._parameters, self._clip_norm).float()
        # Infinite gradients are part of fp16, and no fault: the scaler lowers its scale.
        nonfinite = self._finite_check.nonfinite(measured.get("grad_norm"), loss_alone=scaler.is_enabled())
        loss, self._loss_tap.grad = self._loss_tap.grad, None
        assert loss is not None
        return {"loss": loss if self._loss_stays else loss.clone(), "nonfinite": nonfinite, **measured}

    def marked(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """See Gradients."""
        return optimizer

    live = local = marked

    def end_warm_up(self) -> None:
        """See Gradients."""
        self._loss_tap.grad = None


def data_parallel(model: nn.Module, loss_tap: nn.Parameter, group: Group, train: Train) -> nn.Module:
    """The model in DistributedDataParallel, which also sums the gradient of `loss_tap`; one rank: the model itself."""
    if group.world.size == 1:
        if not (train.shares and train.compile):
            return model
        group.connect_alone()  # torch compiles a model within DDP into other graphs: one for each bucket
    parallel = DistributedDataParallel(
        _WithLossTap(model, loss_tap),
        device_ids=[group.device] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=lays_in_buckets(train, group.device),
        **compat.no_buffer_sync(),  # `Buffers` broadcasts them instead
    )
    if train.shares:
        TreeHook(group.world.size, group.device).register(parallel)
    return parallel


def lays_in_buckets(train: Train, device: torch.device) -> bool:
    """Whether DDP leaves the gradients in its buckets, which saves a copy. On a GPU the order of a sum over a gradient,
    such as its norm, depends on how its memory is aligned: with shares it stays where one rank has it, too."""
    return device.type != "cuda" or not train.shares


def _clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip the gradient to this norm; returns its norm before. One nonfinite gradient makes all nonfinite. An infinite
    limit leaves the gradient as it is."""
    if math.isinf(limit):
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return nn.utils.clip_grad_norm_(parameters, limit)


class _WithLossTap(nn.Module):
    """What DDP wraps: the model and the loss tap, see Replicated."""

    def __init__(self, model: nn.Module, loss_tap: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.loss_tap = loss_tap

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.model(*args, **kwargs)

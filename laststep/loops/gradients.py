"""How the gradients of the ranks meet, and the loss with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from laststep.config.config import Config
from laststep.loops.replicated import Replicated
from laststep.loops.shares import AddsShares
from laststep.ranks.group import Group
from laststep.ranks.world import Gathered, ShardPlace


class Gradients(Protocol):
    """The gradients of a model, and the loss. A step calls `backward` for each micro-batch, `meet`, and `measure`.

    All collectives are in the forward pass, in `backward` and in `meet`.
    """

    waits_in_forward: bool  # whether a forward pass waits for the other ranks
    parallel: nn.Module  # the model as a training step calls it
    share_sum: AddsShares

    def adopt(self, optimizer: Optimizer, task: str) -> None:
        """Prepare the optimiser, which `task` has made. Raises ConfigError."""

    @property
    def in_place(self) -> list[Tensor]:
        """What an update changes in its place."""

    def release(self, model: nn.Module) -> None:
        """Free what a validation has gathered of `model`."""

    def state_of(self, model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
        """The model's state_dict. May be called by any thread, at any time after the warm-up."""

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch; `last`: of the step."""

    def backward(self, scaled: Tensor, loss: Tensor) -> None:
        """The backward pass of `loss`, which the scaler has `scaled`."""

    def meet(self, step: int, scaler: GradScaler, optimizer: Optimizer) -> None:
        """What is left to learn from the other ranks before the update of `step` (from 0). A rank that has this knows
        that the gradients of the step are complete on every rank."""

    def gathered(self, steps: int | None) -> Gathered | None:
        """What `meet` has learned in the last of so many steps, None: of all. None if no rank can use that."""

    def hold(self) -> Callable[[], None]:
        """Keep what `measure` will need for the step that has met. Returns what puts it back."""

    def take(self, gathered: Gathered) -> bool:
        """Take what another rank has learned in `meet`, in place of the thread that waits in it for good. False if this
        rank's gradients of that step are not complete."""

    def measure(self, scaler: GradScaler, optimizer: Optimizer) -> dict[str, Tensor]:
        """The step's `loss` and `nonfinite`, and with optim.clip_norm the norm of the gradient, which this clips. See
        `Learner.update`. No collectives here. What the update changes must not change before this is called."""

    def marked(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the optimiser as a checkpoint holds it."""

    def live(self, marked: dict[str, Any]) -> dict[str, Any]:
        """What the optimiser's part of a checkpoint can be loaded into."""

    def local(self, marked: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the optimiser as the optimiser loads it."""

    def end_warm_up(self) -> None:
        """Drop the loss of the warm-up."""


def make_gradients(model: nn.Module, group: Group, config: Config, place: ShardPlace) -> Gradients:
    """Those of a model that is replicated, or has been sharded. A collective."""
    if place.shards == 1:
        return Replicated(model, group, config)
    from laststep.loops.sharded import Sharded

    return Sharded(model, group, config, place)

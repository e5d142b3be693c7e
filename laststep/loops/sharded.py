"""How the gradients of the ranks meet when each has its shard of the model: FSDP2 gathers weights block by block, and
leaves each rank the sum of its own part of the gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from laststep import compat
from laststep.compat import sharding
from laststep.config.config import Config
from laststep.loops.exact_square import ExactSquare
from laststep.loops.rows import Rows
from laststep.loops.shares import AddsShares, ShareSum, in_order
from laststep.loops.turn_sums import turn_sums
from laststep.ranks.group import Group, tree_sum
from laststep.ranks.world import Gathered, ShardPlace

# In these types the norm of finite gradients is finite, or the gradient is beyond any use.
NORM_SUFFICES = (torch.float32, torch.float64, torch.bfloat16)


class Sharded:
    """The gradients of a model that FSDP2 has sharded, and the loss; the counterpart of `Replicated`.

    No rank has the gradient as a whole. So at the end of each step the ranks gather three numbers of each: its loss,
    whether a gradient is not finite, and the sum of the squares of its gradients. Every rank adds them in the same way.
    A rank that has them all knows that the gradients of the step are reduced on every rank. Should another rank wait
    for them for good, because the ranks between have died, it can take them from this one (`gathered`, `take`).
    """

    waits_in_forward = True

    def __init__(self, model: nn.Module, group: Group, config: Config, place: ShardPlace) -> None:
        self.parallel = model
        self._parameters = list(model.parameters())
        self._group, self._place, self._clip_norm = group, place, config.optim.clip_norm
        self._norm_suffices = all(p.dtype in NORM_SUFFICES for p in self._parameters)
        self._states: dict[int, dict[str, Any]] = {}  # by the id of the model
        self._losses: list[Tensor] = []  # of this rank's shares; without train.shares of the rank
        self._reduced = -1  # the last step (from 0) of which this rank has its gradients
        # The last two steps that have met: mean loss, count of ranks with a nonfinite gradient, and squared norm.
        self._met: dict[int, Tensor] = {}
        self._gradients: list[Tensor] = []  # of this rank's rows
        self._one = torch.ones((), device=group.device)
        self._train, self._in_shares = config.train, config.train.shares is not None
        self._exact: ExactSquare | None = None
        self.share_sum: AddsShares = ShareSum([], 1)
        if self._in_shares:
            self.share_sum = turn_sums(model, config, group, place)
            if self._clip_norm is not None:
                self._exact = ExactSquare(sum(map(len, self._parameters)), group.device)

    def adopt(self, optimizer: Optimizer, task: str) -> None:
        """See Gradients."""
        self._rows = Rows(optimizer, task, fill=self._in_shares and self._group.device.type == "cpu")
        self.marked, self.live, self.local = self._rows.marked, self._rows.live, self._rows.local

    @property
    def in_place(self) -> list[Tensor]:
        """See Gradients."""
        return list(self._rows.own)

    def release(self, model: nn.Module) -> None:
        """See Gradients. FSDP2 keeps what a model's root has gathered until a backward pass has used it."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_of(self, model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
        """See Gradients. It is made once: FSDP2 would free gathered weights, perhaps in the middle of a step."""
        if id(model) not in self._states:
            self._states[id(model)] = model.state_dict(keep_vars=keep_vars)
        return copy.copy(self._states[id(model)])

    def reducing(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """See Gradients. Each micro-batch reduces its gradients: a rank has no memory for all of them."""
        return contextlib.nullcontext()

    def backward(self, scaled: Tensor, loss: Tensor) -> None:
        """See Gradients."""
        scaled.backward()
        if self._losses and not self._in_shares:
            loss = self._losses.pop() + loss
        self._losses.append(loss)

    def meet(self, step: int, scaler: GradScaler, optimizer: Optimizer) -> None:
        """See Gradients. Also unscales the gradients."""
        self._gradients = gradients = self._rows.take_gradients()
        found = torch.zeros((), device=self._group.device)
        if scaler.is_enabled() or self._clip_norm is None or not self._norm_suffices:
            # As GradScaler does it: a reciprocal in fp32 would round twice.
            inverse = scaler.scale(self._one).double().reciprocal().float()
            for dtype in {gradient.dtype: None for gradient in gradients}:
                same = [gradient for gradient in gradients if gradient.dtype is dtype]
                compat.note_nonfinite(same, found, inverse)
        mine = torch.cat([torch.stack([*self._losses, found]).double(), self._square(gradients)])
        losses = len(self._losses)
        self._losses, self._reduced = [], step
        # From here on the thread of a rescue may do the update, should this one never return from the collective, or
        # too late. So all that this one still does is to assign what both then have.
        self._note(step, self._add(self._gather(mine), losses))

    def _gather(self, mine: Tensor) -> Tensor:
        """The numbers of all ranks, a row for each."""
        everyone = mine.new_empty(self._group.world.size * len(mine))
        compat.all_gather_single(everyone, mine)
        return everyone.view(-1, len(mine))

    def _note(self, step: int, met: Tensor) -> None:
        self._met = {known: values for known, values in self._met.items() if known == step - 1} | {step: met}

    def gathered(self, steps: int | None) -> Gathered | None:
        """See Gradients."""
        met = self._met
        step = max(met, default=-1) if steps is None else steps - 1
        if step not in met:
            return None
        return Gathered(step + 1, tuple(value.hex() for value in met[step].tolist()))

    def hold(self) -> Callable[[], None]:
        """See Gradients."""
        reduced, gradients = self._reduced, self._gradients
        of_rows = [rows.grad for rows in self._rows.own]

        def put_back() -> None:
            self._reduced, self._gradients = reduced, gradients
            for rows, gradient in zip(self._rows.own, of_rows):
                rows.grad = gradient

        return put_back

    def take(self, gathered: Gathered) -> bool:
        """See Gradients."""
        step = gathered.step - 1
        if self._reduced != step:
            return False
        values = [float.fromhex(value) for value in gathered.values]
        self._note(step, torch.tensor(values, dtype=torch.float64, device=self._group.device))
        return True

    def _square(self, gradients: Sequence[Tensor]) -> Tensor:
        """What the other ranks need to know of this rank's gradients for the squared norm of all."""
        if self._exact is not None:
            return self._exact.of(gradients)
        if self._clip_norm is None or not gradients:
            return self._one.new_zeros(1, dtype=torch.float64)
        return nn.utils.get_total_norm(gradients).double().square().view(1)

    def _add(self, ranks: Tensor, losses: int) -> Tensor:
        """What all ranks have found, of a row for each, which begins with this many losses."""
        world, shards = self._group.world, self._place.shards  # each replica has all of the gradient
        if not self._in_shares:
            met = torch.cat([ranks[:, :2].sum(0), ranks[:shards, 2:].sum(0)])
            met[0] /= world.size
            return met
        loss = tree_sum(in_order(ranks[:, :losses].float(), self._train, world))  # as DDP adds it with the gradients
        square = ranks[:shards, losses + 1 :]
        total = square.sum() if self._exact is None else self._exact.total(square)
        return torch.stack([loss.double(), ranks[:, losses].sum(), total])

    def measure(self, scaler: GradScaler, optimizer: Optimizer) -> dict[str, Tensor]:
        """See Gradients."""
        met = self._met[self._reduced]
        gradients, self._gradients = self._gradients, []  # whose memory is not kept beyond the update
        if scaler.is_enabled():
            sharding.set_found_inf(scaler, optimizer, (met[1] > 0).float())
        loss = met[0].float()
        bad = ~torch.isfinite(loss)
        measured: dict[str, Tensor] = {}
        if self._clip_norm is not None:
            norm = measured["grad_norm"] = met[2].sqrt().float()
            if not math.isinf(self._clip_norm) and gradients:
                sharding.scale_each(gradients, (self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if not scaler.is_enabled():
            bad |= ~torch.isfinite(met[1:]).all() | (met[1] > 0)
        return {"loss": loss, "nonfinite": bad.float(), **measured}

    def end_warm_up(self) -> None:
        """See Gradients. From here on FSDP2 leaves each shard where it is in memory."""
        self._losses = []
        for parameter in self._parameters:
            parameter.grad = None
        assert self._rows.in_place(), "FSDP2 has moved a shard"

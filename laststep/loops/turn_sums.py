"""The sums of sharded gradients over the shares of `train.shares`, in the tree of `laststep.ranks.group`.

FSDP2 reduces the gradients of a block as soon as a backward pass is through with it, so that no rank ever holds a whole
gradient. So the ranks add before a rank's shares are added, and the shares are dealt out accordingly, see
`laststep.loops.shares.team_of`:

    1. In each turn, which is a backward pass of one share on each rank, an all-to-all brings the same rows of all ranks
       to one of them. It adds those of a team.
    2. A rank adds its sums of one turn after another, as a binary counter does. It holds one more set of its own rows
       for each doubling of the turns.
    3. After the last turn it adds the teams. Under train.sharding=hybrid these are the nodes, each with a copy of the
       rows, and the sum over them is the one that DistributedDataParallel's hook makes, once in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.shares import shares_of, team_of
from laststep.ranks.group import BucketSum, Group, replica_group, tree_sum
from laststep.ranks.world import ShardPlace

UNEQUAL = (
    "train.shares, train.sharding: a parameter of the model has a gradient in some shares only; use all parameters in "
    "each forward pass, or remove train.shares"
)


def turn_sums(model: nn.Module, config: Config, group: Group, place: ShardPlace) -> TurnSums:
    """Those of a model that `laststep.loops.fsdp` has sharded. A collective."""
    turns, team = len(shares_of(config.train, group.world)), team_of(config.train, group.world)
    replicas = None
    if place.replicas > 1:
        replicas = replica_group(place)
    return TurnSums(model, turns, team, replicas)


class TurnSums:
    """Adds the gradients that a model has in the shares of a rank; the counterpart of `ShareSum` under FSDP2."""

    def __init__(self, model: nn.Module, turns: int, team: int, replicas: dist.ProcessGroup | None) -> None:
        """`turns` is how many shares each rank has. `replicas` are the ranks that hold the same rows, where there are
        several."""
        self._parameters = list(model.parameters())
        self._turns, self._replicas = turns, replicas
        self._blocks: list[BlockSum] = []
        self._ends = True  # whether this is the last turn of a step
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._blocks.append(BlockSum(team))
                module.set_custom_reduce_scatter(self._blocks[-1])
                module.set_gradient_divide_factor(1.0)  # a sum, no mean
                module.set_force_sum_reduction_for_comms(True)
                if replicas is not None:
                    module.set_all_reduce_hook(self._add_replicas)

    def end_share(self, share: int) -> None:
        """The next backward pass is that of this share, counted from 0 on this rank."""
        self._ends = share == self._turns - 1
        for block in self._blocks:
            block.begin(share, self._ends)

    def end_backward(self) -> None:
        """Call this after each backward pass. Raises ConfigError."""
        if not self._ends:  # what FSDP2 takes for gradients
            for parameter in self._parameters:
                parameter.grad = None
        elif any(block.waits for block in self._blocks):
            raise ConfigError(UNEQUAL)

    def _add_replicas(self, rows: Tensor) -> None:
        """FSDP2 calls this with the rows of each block: at the end, sum them over the replicas."""
        if self._ends and self._replicas is not None:
            bucket = BucketSum(rows, self._replicas.size(), group=self._replicas)
            bucket.gather()
            bucket.wait()


class BlockSum:
    """What FSDP2 calls for the gradients of a block in place of a reduce-scatter, see torch's ReduceScatter. It gives
    FSDP2 the sum over all turns in the last one, and nothing of use in the others."""

    def __init__(self, team: int) -> None:
        self._team = team
        self._turn, self._ends = 0, True
        self._calls = 0  # in this turn: a block that is used twice may reduce some of its gradients earlier than others
        self._levels: dict[tuple[int, int], Tensor] = {}  # by call and level, as in PartialSums

    def begin(self, turn: int, ends: bool) -> None:
        """The next backward pass is that of this turn; whether it is the last one."""
        self._turn, self._ends, self._calls = turn, ends, 0

    @property
    def waits(self) -> bool:
        """Whether there are sums of earlier turns to which the last one has added nothing."""
        return bool(self._levels)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what goes in and what comes out."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Called within the backward pass. Raises ConfigError."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        call, level, sums = self._calls, 0, tree_sum(received.view(-1, self._team, len(output_tensor)).transpose(0, 1))
        self._calls += 1
        while self._turn >> level & 1:
            earlier = self._levels.pop((call, level), None)
            if earlier is None or earlier.shape != sums.shape:
                raise ConfigError(UNEQUAL)
            sums, level = earlier.add_(sums), level + 1
        if self._ends:
            output_tensor.copy_(tree_sum(sums))  # over the teams of the group
        else:
            self._levels[call, level] = sums if level else sums.clone()  # the others' rows need not be kept

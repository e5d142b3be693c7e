"""The shares of `train.shares`: which of them this rank computes, and how it adds their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from laststep.config.schema import Train
from laststep.ranks.world import World


def shares_of(train: Train, world: World) -> range:
    """The numbers of this rank's shares of the global batch; without `train.shares` each rank has one.

    Each rank has neighbouring ones. Under train.sharding, each `team` of ranks has, and deals them out in turns.
    """
    each, team = (train.shares or world.size) // world.size, team_of(train, world)
    number, place = divmod(world.rank, team)
    first, end = number * team * each, (number + 1) * team * each
    return range(first + place, end, team)


def team_of(train: Train, world: World) -> int:
    """How many neighbouring ranks form a team: a power of two. Sharded gradients are added over the ranks before they
    are added over a rank's shares. So in each turn a team has neighbouring shares, whose sum is a node of the tree."""
    ranks = {"none": 1, "full": world.size, "hybrid": world.local_size}[train.sharding]
    return ranks & -ranks


def in_order(rows: Tensor, train: Train, world: World) -> Tensor:
    """One row for each share, in their order, of rows for each share of each rank."""
    each, team = rows.shape[1], team_of(train, world)
    return rows.view(-1, team, each, *rows.shape[2:]).transpose(1, 2).flatten(0, 2)


class AddsShares(Protocol):
    """Adds the gradients of the shares that a rank computes one after another."""

    def end_share(self, share: int) -> None:
        """The next backward pass is the last one of this share, counted from 0 on this rank."""

    def end_backward(self) -> None:
        """Call this after each backward pass."""


class PartialSums:
    """The sums of the gradients of a rank's shares, of which there are 2^k, in the binary tree of
    `laststep.ranks.group`.

    Autograd itself would add them one after another. So each parameter's gradient is taken out when a share has
    computed it. Like a binary counter, level i holds a sum of 2^i shares or nothing. The last share's gradient stays
    where DDP takes it from, with all others added to it.
    """

    def __init__(self, shares: int) -> None:
        self._levels: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(shares.bit_length() - 1)]

    def add(self, share: int, parameter: nn.Parameter) -> None:
        """The parameter's gradient of this share, counted from 0 on this rank, is complete."""
        level = 0
        while share >> level & 1:  # the bits of the counter that are carried
            earlier = self._levels[level].pop(parameter, None)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
            level += 1
        if level < len(self._levels) and parameter.grad is not None:
            self._levels[level][parameter] = parameter.grad
            parameter.grad = None


class ShareSum(PartialSums):
    """Takes each gradient as soon as autograd has added to it in the last backward pass of a share."""

    def __init__(self, parameters: Iterable[nn.Parameter], shares: int) -> None:
        super().__init__(shares)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._share = 0  # of this rank's, the one under way
        self._left: set[nn.Parameter] = set()  # the parameters whose gradient of this share is not complete yet
        if self._levels:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._complete)

    def end_share(self, share: int) -> None:
        """See AddsShares."""
        if self._levels:
            self._share, self._left = share, set(self._parameters)

    def end_backward(self) -> None:
        """See AddsShares. Completes the parameters that the last backward pass of a share has not reached."""
        for parameter in tuple(self._left):
            self._complete(parameter)

    def _complete(self, parameter: nn.Parameter) -> None:
        """Autograd calls this with each parameter whose gradient it has added to."""
        if parameter not in self._left:
            return
        self._left.remove(parameter)
        self.add(self._share, parameter)

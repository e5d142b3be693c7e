"""The shares of `train.shares`: which of them this rank computes, and how it adds their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laststep.config.checks import check_size
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Train
from laststep.data.loader import StepLoader, StepNumbers
from laststep.data.order import nth_seed, seed_generators, seed_of
from laststep.data.streams import StepStream
from laststep.loops.measured import LoggedValues
from laststep.loops.registered import Registered
from laststep.ranks.group import Group, TreeHook
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
    """`rows` for each share of each rank, (ranks, shares of a rank, ...), in the order of the shares: (shares, ...)."""
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
                # Without a gradient here, other ranks may have added zeros: a zero may have changed its sign.
                parameter.grad = earlier.add_(0.0) if parameter.grad is None else parameter.grad.add_(earlier)
            elif parameter.grad is not None:
                parameter.grad.add_(0.0)
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
        """The next backward pass is the last one of this share, counted from 0 on this rank."""
        if self._levels:
            self._share, self._left = share, set(self._parameters)

    def end_backward(self) -> None:
        """Complete the parameters that the last backward pass of a share has not reached."""
        for parameter in tuple(self._left):
            self._complete(parameter)

    def _complete(self, parameter: nn.Parameter) -> None:
        """Autograd calls this with each parameter whose gradient it has added to."""
        if parameter not in self._left:
            return
        self._left.remove(parameter)
        self.add(self._share, parameter)


NOT_IN_SHARES = (
    "with train.shares a batch of run.steps(...) comes in shares: write `for batch in run.shares(batch):` around the "
    "forward and backward pass, and optimizer.step() after this loop"
)


class SharedBatch:
    """What run.steps(loader) gives with train.shares: run.shares(...) takes this rank's shares out of it."""

    def __init__(self, shares: Iterator[Any]) -> None:
        self._shares = shares

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(NOT_IN_SHARES)

    __iter__ = __len__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> Any:
        """Such as `batch.to(device)`."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


class CustomShares:
    """The shares of `train.shares` in a custom training loop: `for batch in run.shares(batch)`.

    The function makes the forward and backward passes of one share after another. Each share begins with the same
    buffers and has a seed of its own, its gradients are weighted by its part of the samples, and the sums of gradients
    and logged values follow the tree of `laststep.ranks.group`. Without train.shares a rank has one, its part of the
    batch, and nothing about it changes.
    """

    def __init__(
        self, config: Config, group: Group, logged: LoggedValues, seed_more: Callable[[int], None] = lambda _: None
    ) -> None:
        """`seed_more` is called with each seed, for generators besides the global ones. Raises ConfigError where the
        ranks cannot divide the shares."""
        self._seed_more = seed_more
        self.total, world = config.train.shares, group.world
        check_size(self.total, world.size)
        self._group, self._logged = group, logged
        self._seeds = [seed_of("steps", config.seed, share) for share in shares_of(config.train, world)]
        # Outside of shares all ranks draw the same numbers: they may be for the whole batch.
        self.place = world.rank if self.total is None else "all"
        self._around, self._after = (seed_of(part, config.seed, self.place) for part in ("steps", "after shares"))
        self._models: list[_SummedModel] = []
        self._registered: Registered
        self._step = 0  # the open one, from 0
        self._batch: Any = None  # its batch, until run.shares(...) takes it
        self._weights: list[float] = []
        self._computed = 0  # shares of the open step
        self._under_way = False  # the next of them

    @property
    def here(self) -> int:
        """How many of the shares are this rank's."""
        return len(self._seeds)

    def unit(self, step: int) -> int | None:
        """The number of the share under way, among those of this rank in all steps; None outside of shares. Without
        train.shares, this step."""
        if self.total is None:
            return step
        return step * self.here + self._computed if self._under_way else None

    def register(self, registered: Registered, averages_gradients: bool) -> None:
        """Sum the gradients of these objects over the shares from now on, if there are shares. `averages_gradients`:
        the function, or a framework, does so without DistributedDataParallel. Raises ConfigError if nothing does."""
        self._registered, size = registered, self._group.world.size
        unsummed = registered.unaveraged()
        what = f"run.restore({''.join(unsummed[:1])}=...): updates parameters of no registered DistributedDataParallel"
        if self.total is None:
            if unsummed and size > 1 and not averages_gradients:
                raise ConfigError(
                    f"{what}, so nothing averages their gradients over the {size} ranks. Register the "
                    "DistributedDataParallel itself, not the module inside it, or make the optimizer after "
                    "fully_shard; or, if the loop averages them, set run.averages_gradients = True before "
                    "run.restore(...)"
                )
            return
        if registered.has_sharded:
            raise ConfigError("train.shares cannot be combined with a sharded model (fully_shard) yet; remove this key")
        if averages_gradients:
            raise ConfigError(
                "train.shares needs a registered DistributedDataParallel, which sums the gradients; leave out "
                "run.averages_gradients and run.checkpoint(...), or this key"
            )
        if unsummed:
            raise ConfigError(
                f"{what}, which sums the gradients with train.shares, on one rank too. Wrap the model at any number of "
                "ranks, and register the DistributedDataParallel itself, not the module inside it"
            )
        for _, ddp in registered.parallel:
            _check_summable(ddp, self._group)
            self._models.append(_SummedModel(ddp, self.here, TreeHook(size, self._group.device)))

    def check_loader(self, batch_size: int, shares: int | None) -> None:
        """Raise ConfigError unless such a batch divides into the parts of all ranks, and `shares`, if given, is
        train.shares."""
        if shares is not None and shares != self.total:
            raise ConfigError(
                f"run.loader(shares={shares}): train.shares is {self.total or 'not set'}, and decides how the ranks "
                f"start; set train.shares={shares}"
            )
        parts, what = (self._group.world.size, "ranks") if self.total is None else (self.total, "shares")
        if batch_size % parts:
            raise ConfigError(f"run.loader(batch_size={batch_size}): not divisible by {parts} {what}")

    def begin_step(self, step: int, loader: StepLoader | StepStream | StepNumbers, batches: Iterator[Any]) -> Any:
        """What the function is given for this step: the next of the batches, or what has them in shares."""
        if self.total is None:
            batch = next(batches)  # first, as loading may draw random numbers
        elif isinstance(loader, (StepLoader, StepStream)):
            self._batch = batch = SharedBatch(batches)
            self._weights = loader.weights(step)
        else:
            self._batch = batch = next(batches)
            self._weights = [1 / self.total] * self.here
        self._step, self._computed = step, 0
        self.seed(step)
        return batch

    def seed(self, step: int, micro_batch: int = 0) -> None:
        """Seed all generators for a micro-batch (from 0) of a step."""
        seed = nth_seed(self._around, step)
        self._seed(nth_seed(seed, micro_batch) if micro_batch else seed)

    def of(self, batch: Any) -> Iterator[Any]:
        """This rank's shares of the batch of the open step, one after another. Raises ConfigError."""
        if self.total is None:
            yield batch
            return
        if type(batch) not in (SharedBatch, int) or batch != self._batch:
            raise ConfigError(
                "run.shares(batch) takes the batch that this iteration of run.steps(...) gave, once: make all forward "
                "and backward passes of a share in one loop over run.shares(batch)"
            )
        self._batch = None
        self._clear_gradients()
        buffers = self._registered.buffers
        start = buffers.copy() if self.here > 1 else None
        try:
            for number, (seed, weight) in enumerate(zip(self._seeds, self._weights)):
                share = next(batch._shares) if isinstance(batch, SharedBatch) else batch  # may draw random numbers
                if number:
                    buffers.rewind(start)
                for model in self._models:
                    model.begin_share(number, weight)
                self._logged.begin_share()
                self._seed(nth_seed(seed, self._step))
                self._under_way = True
                yield share
                self._under_way = False
                for model in self._models:
                    model.end_share(self._step)
                buffers.capture()
                self._computed += 1
        finally:
            self._under_way = False
            for model in self._models:
                model.close()
        self._logged.end_shares(self._weights)
        self._seed(nth_seed(self._after, self._step))

    def _seed(self, seed: int) -> None:
        seed_generators(seed, self._group.device)
        self._seed_more(seed)

    def check_complete(self) -> None:
        """The update of the open step begins. Raises ConfigError unless the gradients are those of all shares."""
        if self.total is None or self._computed == self.here:
            return
        if self._batch is not None:
            raise ConfigError(f"step {self._step + 1} has computed none of its shares: {NOT_IN_SHARES}")
        raise ConfigError(
            f"step {self._step + 1} would end after {self._computed} of this rank's {self.here} shares: let the loop "
            "over run.shares(batch) run to its end, and call optimizer.step() after it"
        )

    def _clear_gradients(self) -> None:
        """Let each share begin without gradients. Raises ConfigError if there are any but zeros."""
        parameters = [p for model in self._models for p in model.parameters if p.grad is not None]
        if parameters and bool(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])):
            raise ConfigError(
                f"step {self._step + 1} has gradients before its shares: call optimizer.zero_grad() after "
                "optimizer.step() or before run.shares(batch), and make each backward pass in that loop"
            )
        for parameter in parameters:
            parameter.grad = None


class _SummedModel:
    """A registered DistributedDataParallel. Its own sum over the ranks, in the last backward pass of the last share,
    finds the weighted sum of this rank's shares in each gradient."""

    def __init__(self, ddp: DistributedDataParallel, shares: int, hook: TreeHook) -> None:
        """Raises ConfigError for one that has another hook."""
        self.parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        self._ddp, self._hook = ddp, hook
        try:
            self._hook.register(ddp)
        except RuntimeError as error:
            raise ConfigError(
                "a registered DistributedDataParallel has a communication hook of its own; train.shares sums the "
                "gradients by another one, so leave out register_comm_hook(...)"
            ) from error
        self._sums, self._last = PartialSums(shares), shares - 1
        self._share: int | None = None  # the one under way
        self._weight = 1.0
        self._used = False  # in this step
        self._left: set[nn.Parameter] = set()  # whose gradient of the last share is not complete yet
        self._summed = 0  # sums over the ranks before this step
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._added_to)

    def begin_share(self, share: int, weight: float) -> None:
        """A share, counted from 0 on this rank, begins."""
        if share == 0:
            self._used, self._summed = False, self._hook.sums
        self._share, self._weight, self._left = share, weight, set(self.parameters)
        self._ddp.require_backward_grad_sync = share == self._last

    def end_share(self, step: int) -> None:
        """The function is done with it. Raises ConfigError if the last share's gradients were not summed."""
        if self._share != self._last:
            for parameter in self.parameters:
                self._complete(parameter)
        elif self._used and (self._left or self._hook.sums != self._summed + 1):
            raise ConfigError(
                f"step {step + 1} has not summed all gradients over the ranks: call the registered "
                "DistributedDataParallel itself, use all its parameters in each share, and put all but the last "
                "forward and backward pass of a share into `with model.no_sync():`"
            )

    def close(self) -> None:
        """No share is under way."""
        self._share, self._ddp.require_backward_grad_sync = None, True

    def _added_to(self, parameter: nn.Parameter) -> None:
        """Autograd calls this with each parameter whose gradient it has added to, before DDP sees it."""
        if self._share is None:
            raise ConfigError(
                "a backward pass outside of run.shares(batch): with train.shares the gradients of a registered "
                "DistributedDataParallel are summed over the shares, and are of no use elsewhere"
            )
        self._used = True
        if parameter not in self._left:
            raise ConfigError(
                "a backward pass after the one that sums the gradients over the ranks: put all forward and backward "
                "passes of a share but the last into `with model.no_sync():`"
            )
        # DDP sums after this backward pass if its last forward pass was not within no_sync().
        if self._share == self._last and self._ddp.require_forward_param_sync:
            self._left.remove(parameter)
            self._complete(parameter)

    def _complete(self, parameter: nn.Parameter) -> None:
        assert self._share is not None
        if parameter.grad is not None:
            parameter.grad.mul_(self._weight)
        self._sums.add(self._share, parameter)


def _check_summable(ddp: DistributedDataParallel, group: Group) -> None:
    """Raise ConfigError if the gradients of this model cannot be summed in shares."""
    if ddp.find_unused_parameters or ddp.static_graph:
        raise ConfigError(
            "DistributedDataParallel(find_unused_parameters=True) or (static_graph=True): with train.shares every "
            "parameter must receive a gradient in every share; leave these options out"
        )
    if ddp.gradient_as_bucket_view and group.device.type == "cuda":  # see gradients.lays_in_buckets
        raise ConfigError(
            "DistributedDataParallel(gradient_as_bucket_view=True): with train.shares on a GPU a gradient's place in "
            "memory must not depend on DDP's buckets; leave this option out"
        )
    if dist.get_world_size(ddp.process_group) != group.world.size:
        raise ConfigError(
            "DistributedDataParallel(process_group=...): train.shares sums over all ranks; leave this option out"
        )

"""A model of which each rank has its shard: FSDP2 gathers weights block by block, and leaves each rank the sum of its
own part of the gradients.

`Sharded` is how the gradients meet, with `ShardedShareSum` and `ExactSquare` for train.shares; `Rows` is the optimiser
of a rank's rows; `shard` cuts a model; and `build` makes one of which only rank 0 holds the whole, until each has its
rows.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from laststep import compat
from laststep.checkpoint.shards import Like, is_distributed, local_of, shard_count, sharded_like
from laststep.config.checks import NOT_BY_ROWS, NOT_BY_ROWS_WHY
from laststep.config.config import Config
from laststep.config.errors import ConfigError, first_line
from laststep.loops.gradients import Gradients, repeated_blocks
from laststep.loops.initial_weights import fill
from laststep.loops.shares import AddsShares, ShareSum, in_order, shares_of, team_of
from laststep.optim.build import needs_other_rows
from laststep.ranks.group import BucketSum, Group, make_mesh, replica_group, tree_sum
from laststep.ranks.world import Gathered, ShardPlace
from laststep.say import say
from laststep.task import Task

# In these types the norm of finite gradients is finite, or the gradient is beyond any use.
NORM_SUFFICES = (torch.float32, torch.float64, torch.bfloat16)


class Sharded(Gradients):
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
            rounds, team = len(shares_of(config.train, group.world)), team_of(config.train, group.world)
            replicas = replica_group(place) if place.replicas > 1 else None
            self.share_sum = ShardedShareSum(model, rounds, team, replicas)
            if self._clip_norm is not None:
                self._exact = ExactSquare(sum(map(len, self._parameters)), group.device)

    def adopt(self, optimizer: Optimizer, task: str) -> None:
        """The optimiser updates the rows of this rank, in place of its sharded parameters, see `Rows`."""
        self._rows = Rows(optimizer, task, fill=self._in_shares and self._group.device.type == "cpu")

    def marked(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """Tensors that are rows say so."""
        return self._rows.marked(optimizer)

    def live(self, marked: dict[str, Any]) -> dict[str, Any]:
        """With what the optimiser makes only in its first step."""
        return self._rows.live(marked)

    def local(self, marked: dict[str, Any]) -> dict[str, Any]:
        """The opposite of `marked`."""
        return self._rows.local(marked)

    @property
    def in_place(self) -> list[Tensor]:
        """The rows of this rank."""
        return list(self._rows.own)

    def release(self, model: nn.Module) -> None:
        """FSDP2 keeps what a model's root has gathered until a backward pass has used it."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_of(self, model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
        """It is made once: FSDP2 would free gathered weights, perhaps in the middle of a step."""
        if id(model) not in self._states:
            self._states[id(model)] = model.state_dict(keep_vars=keep_vars)
        return copy.copy(self._states[id(model)])

    def reducing(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Each micro-batch reduces its gradients: a rank has no memory for all of them."""
        return contextlib.nullcontext()

    def backward(self, scaled: Tensor, loss: Tensor) -> None:
        """FSDP2 reduces the gradients block by block; the loss waits for `meet`."""
        scaled.backward()
        if self._losses and not self._in_shares:
            loss = self._losses.pop() + loss
        self._losses.append(loss)

    def meet(self, step: int, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Gathers three numbers of each rank, and unscales the gradients."""
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
        """The numbers of all ranks, (ranks, numbers), of this rank's, (numbers,)."""
        everyone = mine.new_empty(self._group.world.size * len(mine))
        compat.all_gather_single(everyone, mine)
        return everyone.view(-1, len(mine))

    def _note(self, step: int, met: Tensor) -> None:
        self._met = {known: values for known, values in self._met.items() if known == step - 1} | {step: met}

    def gathered(self, steps: int | None) -> Gathered | None:
        """The three numbers of that step."""
        met = self._met
        step = max(met, default=-1) if steps is None else steps - 1
        if step not in met:
            return None
        return Gathered(step + 1, tuple(value.hex() for value in met[step].tolist()))

    def hold(self) -> Callable[[], None]:
        """The gradients of the rows."""
        reduced, gradients = self._reduced, self._gradients
        of_rows = [rows.grad for rows in self._rows.own]

        def put_back() -> None:
            self._reduced, self._gradients = reduced, gradients
            for rows, gradient in zip(self._rows.own, of_rows):
                rows.grad = gradient

        return put_back

    def take(self, gathered: Gathered) -> bool:
        """This rank's rows have their gradients, and the three numbers are the same on every rank."""
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
        """What all ranks have found, (3,): the mean loss, how many have a nonfinite gradient, and the squared norm.
        `ranks`, (ranks, numbers), has a row for each, which begins with this many losses."""
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
        """Clips by the norm that `meet` has found."""
        met = self._met[self._reduced]
        gradients, self._gradients = self._gradients, []  # whose memory is not kept beyond the update
        if scaler.is_enabled():
            compat.set_found_inf(scaler, optimizer, (met[1] > 0).float())
        loss = met[0].float()
        bad = ~torch.isfinite(loss)
        measured: dict[str, Tensor] = {}
        if self._clip_norm is not None:
            norm = measured["grad_norm"] = met[2].sqrt().float()
            if not math.isinf(self._clip_norm) and gradients:
                compat.scale_each(gradients, (self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if not scaler.is_enabled():
            bad |= ~torch.isfinite(met[1:]).all() | (met[1] > 0)
        return {"loss": loss, "nonfinite": bad.float(), **measured}

    def end_warm_up(self) -> None:
        """From here on FSDP2 leaves each shard where it is in memory."""
        self._losses = []
        for parameter in self._parameters:
            parameter.grad = None
        assert self._rows.in_place(), "FSDP2 has moved a shard"


UNEQUAL = (
    "train.shares, train.sharding: a parameter of the model has a gradient in some shares only; use all parameters in "
    "each forward pass, or remove train.shares"
)


class ShardedShareSum:
    """The sums of sharded gradients over the shares of `train.shares`, in the tree of `laststep.ranks.group`; the
    counterpart of `ShareSum` under FSDP2.

    FSDP2 reduces the gradients of a block as soon as a backward pass is through with it, so that no rank ever holds a
    whole gradient. So the ranks add before a rank's shares are added, and the shares are dealt out accordingly, see
    `laststep.loops.shares.team_of`:

    1. In each round, a backward pass of one share on each rank, an all-to-all brings the same rows of all ranks to one
       of them. It adds those of a team.
    2. A rank adds its sums of one round after another, as a binary counter does. It holds one more set of its own rows
       for each doubling of the rounds.
    3. After the last round it adds the teams. Under train.sharding=hybrid these are the nodes, each with a copy of the
       rows, and the sum over them is the one that DistributedDataParallel's hook makes, once in a step.
    """

    def __init__(self, model: nn.Module, rounds: int, team: int, replicas: dist.ProcessGroup | None) -> None:
        """`rounds` is how many shares each rank has. `replicas` are the ranks that hold the same rows, where there are
        several."""
        self._parameters = list(model.parameters())
        self._rounds, self._replicas = rounds, replicas
        self._blocks: list[BlockSum] = []
        self._ends = True  # whether this is the last round of a step
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
        self._ends = share == self._rounds - 1
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
    FSDP2 the sum over all rounds in the last one, and nothing of use in the others."""

    def __init__(self, team: int) -> None:
        self._team = team
        self._round, self._ends = 0, True
        self._calls = 0  # in this round: a block that is used twice may reduce some gradients earlier than others
        self._levels: dict[tuple[int, int], Tensor] = {}  # by call and level, as in PartialSums

    def begin(self, number: int, ends: bool) -> None:
        """The next backward pass is that of this round; whether it is the last one."""
        self._round, self._ends, self._calls = number, ends, 0

    @property
    def waits(self) -> bool:
        """Whether there are sums of earlier rounds to which the last one has added nothing."""
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
        while self._round >> level & 1:
            earlier = self._levels.pop((call, level), None)
            if earlier is None or earlier.shape != sums.shape:
                raise ConfigError(UNEQUAL)
            sums, level = earlier.add_(sums), level + 1
        if self._ends:
            output_tensor.copy_(tree_sum(sums))  # over the teams of the group
        else:
            self._levels[call, level] = sums if level else sums.clone()  # the others' rows need not be kept


WINDOWS = 3
MANTISSA = 53  # bits of a float64
LOWEST = -900  # rows below 2 ** LOWEST count as nothing, and all numbers here stay in the range of float64


class ExactSquare:
    """Sums the squares of a gradient, of which each rank has some rows.

    The squares in a row are added in a tree, on the rank that has the row. The sum over all rows is exact, so its order
    is free, see Demmel and Nguyen, "Fast reproducible floating-point summation" (2013): the bits of these numbers are
    cut at fixed places into windows, so narrow that a float64 holds the sum of one window over all rows without
    rounding. A rank sums its three highest windows. What lies below is left out, at most 2 ** -2w of the largest row
    for each row, with windows of w bits: a part of 2 ** -24 of the sum with 2 ** 27 rows, 2 ** -46 with 2 ** 20.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """`rows` is how many rows all gradients have together, on all ranks."""
        self._width, self._device = MANTISSA - rows.bit_length(), device

    def of(self, gradients: Sequence[Tensor]) -> Tensor:
        """What `total` needs to know of a rank's rows: the number of its highest window, and the sums of its windows.
        All float64."""
        squares = [row_squares(gradient) for gradient in gradients]
        rows = torch.cat(squares or [torch.zeros(1, device=self._device)]).double()
        exponent = (rows.amax().view(torch.int64) >> MANTISSA - 1) - 1023  # of the largest; of 0 it is the least
        top = exponent.clamp(min=LOWEST).div(self._width, rounding_mode="floor")
        sums = [top.double()]
        for window in range(WINDOWS):
            unit = _power_of_two((top - window) * self._width)
            digits = (rows / unit).floor()
            rows = rows - digits * unit
            sums.append(digits.sum())
        return torch.stack(sums)

    def total(self, ranks: Tensor) -> Tensor:
        """The sum of all squares, not finite if a gradient is not. `ranks` is (ranks, 1 + windows)."""
        top = ranks[:, 0].amax()
        window = (top - ranks[:, :1]) + torch.arange(WINDOWS, device=ranks.device)  # counted from the highest of all
        total = torch.zeros_like(top)
        for number in reversed(range(WINDOWS)):
            digits = ranks[:, 1:].where(window == number, 0).sum()
            total = total + digits * _power_of_two(((top - number) * self._width).long())
        return total


def row_squares(gradient: Tensor) -> Tensor:
    """The sum of the squares of each row, added in an order that depends on the length of a row alone: torch's own sums
    depend on the shape of a tensor."""
    squares = gradient.reshape(len(gradient), -1)
    squares = (squares if squares.itemsize >= 4 else squares.float()).square()
    while (length := squares.shape[1]) > 1:
        half = length // 2
        folded = squares[:, :half] + squares[:, half : 2 * half]
        if length % 2:
            folded[:, 0] += squares[:, -1]
        squares = folded
    return squares[:, 0]


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent, exactly: torch's own powers may be rounded."""
    return (exponent + 1023 << MANTISSA - 1).view(torch.float64)


# On a CPU torch's fused optimisers compute the elements at the end of a tensor that do not fill a vector in float64.
WHOLE_VECTORS = 64  # bytes: the widest


class Rows:
    """An optimiser of sharded parameters: each rank updates its own rows, as if they were parameters of their own.

    torch's optimisers also take DTensors, some of them, and spend longer on finding out how to handle each than on the
    update itself. What such an optimiser does to a parameter must not depend on rows that other ranks hold.
    """

    def __init__(self, optimizer: Optimizer, task: str, fill: bool = False) -> None:
        """Replaces the parameters of the optimiser. Raises ConfigError if `task` has made one that needs all rows.

        With `fill` the rows end with zeros that fill the last vector, so what becomes of an element does not depend on
        where a tensor is cut. The optimiser then has tensors of one dimension.
        """
        _check(optimizer, task)
        self._fills = fill
        self.whole: list[nn.Parameter] = []
        self.own: list[nn.Parameter] = []
        self._wrapped: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        before = dict(optimizer.state)
        optimizer.state.clear()
        cut = filled_in_place if fill else Tensor.detach
        for group in optimizer.param_groups:
            own = [nn.Parameter(cut(local_of(whole)), whole.requires_grad) for whole in group["params"]]
            for whole, rows in zip(group["params"], own):
                if whole in before:
                    optimizer.state[rows] = {name: self._own(value) for name, value in before[whole].items()}
            self.whole += group["params"]
            self.own += own
            group["params"] = own

    def take_gradients(self) -> list[Tensor]:
        """Move the gradients of the parameters to their rows; returns those that have elements."""
        return [gradient for gradient in self._taken() if gradient.numel()]

    def _taken(self) -> Iterator[Tensor]:
        for whole, rows in zip(self.whole, self.own):
            gradient, whole.grad, rows.grad = whole.grad, None, None
            if gradient is not None:
                rows.grad = self._own(gradient)
                yield self._rows_in(rows.grad, whole)

    def in_place(self) -> bool:
        """Whether these still are the rows of the parameters."""
        return all(local_of(whole).data_ptr() == rows.data_ptr() for whole, rows in zip(self.whole, self.own))

    def marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the optimiser in which tensors that are rows say so."""
        return {**state, "state": {number: self._mark(number, values) for number, values in state["state"].items()}}

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """The opposite: one that the optimiser can load."""
        by_number = {
            number: {name: self._own(value) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        return {**state, "state": by_number}

    def live(self, marked: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint can be loaded into: an optimiser makes most of its state in its first step."""
        return {**marked, "state": {**{n: Like(whole) for n, whole in enumerate(self.whole)}, **marked["state"]}}

    def _mark(self, number: int, values: dict[str, Any]) -> dict[str, Any]:
        whole, rows = self.whole[number], self.own[number]
        marked = dict(values)
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == rows.shape:
                known = self._wrapped.get((number, name))
                if known is None or known[0] is not value:
                    known = self._wrapped[number, name] = value, sharded_like(whole, self._rows_in(value, whole))
                marked[name] = known[1]
        return marked

    def _own(self, value: Any) -> Any:
        """A gradient, or a value of the state, as the optimiser has it."""
        if not isinstance(value, Tensor):
            return value
        rows = local_of(value)
        return filled(rows) if self._fills and is_distributed(value) else rows

    def _rows_in(self, own: Tensor, whole: nn.Parameter) -> Tensor:
        """The rows in what the optimiser has."""
        if not self._fills:
            return own
        rows = local_of(whole)
        return own[: rows.numel()].view(rows.shape)


def filled(rows: Tensor) -> Tensor:
    """A copy of the rows, with zeros up to a whole number of vectors."""
    copy = rows.new_zeros(_filled_length(rows))
    copy[: rows.numel()].copy_(rows.flatten())
    return copy


def filled_in_place(rows: Tensor) -> Tensor:
    """The memory of the rows, which FSDP2 has for them alone, with zeros up to a whole number of vectors."""
    length, storage = _filled_length(rows), rows.untyped_storage()
    assert rows.storage_offset() == 0 and rows.is_contiguous(), "FSDP2 has put other rows before these"
    storage.resize_(max(storage.nbytes(), length * rows.itemsize))
    whole = rows.new_empty(0).set_(storage, 0, (length,), (1,))
    whole[rows.numel() :].zero_()
    return whole


def _filled_length(rows: Tensor) -> int:
    return -(-rows.nbytes // WHOLE_VECTORS) * WHOLE_VECTORS // rows.itemsize


def _check(optimizer: Optimizer, task: str) -> None:
    """Raise ConfigError unless this optimiser can update rows."""
    kind, made = type(optimizer), f"task={task}: optimizer()"
    if any(base.__name__.lower() in NOT_BY_ROWS for base in kind.__mro__) or needs_other_rows(optimizer):
        raise ConfigError(f"{made}: {kind.__name__} {NOT_BY_ROWS_WHY}, so train.sharding cannot shard it")
    if (kind.state_dict, kind.load_state_dict) != (Optimizer.state_dict, Optimizer.load_state_dict):
        raise ConfigError(
            f"{made}: {kind.__name__} has a state_dict of its own, of which train.sharding cannot tell what are rows"
        )


LEAST_SHARE = 0.01  # of the largest block: a smaller one is not worth a collective of its own
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard(models: Sequence[nn.Module], task: Task, config: Config, group: Group, place: ShardPlace) -> None:
    """Cut each of these models into shards, on its device: as the task says, or by default its repeated blocks and the
    rest. A collective. Raises ConfigError for a model that cannot be cut."""
    mesh = make_mesh(place, group.device, adds_replicas=config.train.shares is None)
    by_task = type(task).shard is not Task.shard
    given = f"train.sharding={config.train.sharding}: {config.task}"
    for model in models:
        if scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
            raise ConfigError(f"{given}: {scalars[0]} has no rows to cut; give this parameter the shape (1,)")
        ties = _ties(model)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # its layers take no nested tensors once they have hooks
        try:
            task.shard(model, mesh) if by_task else _shard(model, mesh, HALF.get(config.train.precision))
        except (AssertionError, RuntimeError, ValueError) as error:  # from torch; NotImplementedError is one, too
            raise ConfigError(f"{given}: this model cannot be sharded: {first_line(error)}") from error
        if not isinstance(model, FSDPModule):
            raise ConfigError(f"{given}.shard() must call fully_shard on the model itself, last")
        for one, other in sorted(ties - _ties(model)):
            raise ConfigError(
                f"{given}.shard() must cut {one} and {other}, which are one parameter, together: "
                "fully_shard([module, module], mesh=mesh)"
            )
        for name, parameter in model.named_parameters():
            if not _is_cut(parameter, place):
                raise ConfigError(f"{given}.shard() must cut each parameter by rows over the mesh; {name} is not")
        if mixed := _mixed_types(model):
            raise ConfigError(f"{given}: {mixed}, and are gathered together; give both the same type")


def _shard(model: nn.Module, mesh: DeviceMesh, half: torch.dtype | None) -> None:
    """Cut the blocks, each to be gathered when it runs, and then the rest."""
    blocks = _blocks_of(model)
    inner = {id(module) for block in blocks for module in block.modules()}
    for part in (*blocks, model):
        rest = [module for module in part.modules() if part is not model or id(module) not in inner]
        fully_shard(part, mesh=mesh, mp_policy=_policy(rest, half))


def _policy(modules: Sequence[nn.Module], half: torch.dtype | None) -> MixedPrecisionPolicy:
    """The precision in which these modules are gathered. Gradients are added in fp32. What goes into them is left to
    autocast, which casts it where that loses nothing."""
    if half is None or any(compat.is_batch_norm(module) for module in modules):  # its statistics are fp32
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that are worth it, without those that share anything with other parts of the model: FSDP2
    gathers that with the rest."""
    blocks = [block for block in repeated_blocks(model) if block is not model]
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    blocks = [block for block, size in zip(blocks, sizes) if size and size >= LEAST_SHARE * max(sizes)]
    within: dict[int, set[int]] = {}  # the blocks that a module is in
    for number, block in enumerate(blocks):
        for module in block.modules():
            within.setdefault(id(module), set()).add(number)
    roots = {id(block) for block in blocks}
    users: dict[int, set[int]] = {}  # the blocks that use a module or a parameter; -1: the rest of the model
    for module in model.modules():
        for used in (*module.children(), *module.parameters(recurse=False)):
            if id(used) not in roots:
                users.setdefault(id(used), set()).update(within.get(id(module), {-1}))
    shared = {number for numbers in users.values() if len(numbers) > 1 for number in numbers}
    return [block for number, block in enumerate(blocks) if number not in shared]


def _ties(model: nn.Module) -> set[tuple[str, str]]:
    """The names of the same parameter, in pairs."""
    first: dict[int, str] = {}
    names = [(first.setdefault(id(p), name), name) for name, p in model.named_parameters(remove_duplicate=False)]
    return {(one, other) for one, other in names if one != other}


def _mixed_types(model: nn.Module) -> str:
    """Says which two trainable parameters that are gathered together have different types, if any do. torch would
    refuse them in the first forward pass."""
    parts = [name and f"{name}." for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part = max(filter(name.startswith, parts), key=len)
            one, dtype = first.setdefault(part, (name, parameter.dtype))
            if parameter.dtype != dtype:
                return f"{one} is {dtype}, {name} {parameter.dtype}"
    return ""


def _is_cut(parameter: nn.Parameter, place: ShardPlace) -> bool:
    try:
        return shard_count(parameter) == place.shards
    except ValueError:
        return False


CPU, META = torch.device("cpu"), torch.device("meta")
Slot = tuple[nn.Module, str]  # a module, and the name of its parameter or buffer


class InitialValues:
    """The values of a model that has been built without memory: those with which rank 0 has built it, too."""

    def __init__(self, whole: nn.Module | None) -> None:
        """`whole` is the model with its values, on rank 0."""
        self._values = [] if whole is None else [tensor.detach() for tensor, _ in _slots([whole])]
        self._slots: list[tuple[Tensor, list[Slot]]] = []

    def note(self, models: Sequence[nn.Module]) -> None:
        """`models` are the one without memory and copies of it. Call this before any of them is changed."""
        self._slots = _slots(models)

    @torch.no_grad()
    def fill(self, models: Sequence[nn.Module], group: Group) -> None:
        """Give the models, which have been sharded, memory on the group's device, and their values: tensor by tensor
        rank 0 sends the whole one, and each rank takes its rows. A collective."""
        made: dict[int, Tensor] = {}
        for shape, slots in self._slots:
            value = torch.empty_like(shape, device=group.collective_device, memory_format=torch.contiguous_format)
            if self._values:
                value.copy_(self._values.pop(0))
            if value.numel():
                group.broadcast([value.view(-1).view(torch.uint8)])
            for module, name in slots:
                before = getattr(module, name)
                if id(before) not in made:  # a tied parameter has several slots
                    made[id(before)] = _with_memory(before, group.device)
                    fill(made[id(before)], value, group)
                setattr(module, name, made[id(before)])
        for model in models:
            model.load_state_dict({}, strict=False)  # has FSDP2 look where its shards are now


def build(
    make: Callable[[], nn.Module], reseed: Callable[[], None], rank: int
) -> tuple[nn.Module, InitialValues | None]:
    """The model on the meta device, with its initial values; or with memory, where that cannot be, which is said.

    Rank 0 builds it with memory first, and then all ranks without: a task may keep what it has built last.
    """
    whole = None
    if rank == 0:
        whole = make()
        reseed()
    try:
        with META, _NumbersOnCPU():
            model = make()
        if not all(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeError("it makes parameters on a device that it names itself")
        return model, InitialValues(whole)
    except Exception as error:  # what the model itself raises, it raises again below
        if rank == 0:
            why = first_line(error)
            say(f"WARNING: model() cannot be built shard by shard ({why}); each rank first builds it in host memory")
    reseed()
    return make(), None


def _slots(models: Sequence[nn.Module]) -> list[tuple[Tensor, list[Slot]]]:
    """The parameters and buffers of a model, each with the places where it and its copies stand."""
    found: dict[int, tuple[Tensor, list[Slot]]] = {}
    for alike in zip(*(model.modules() for model in models)):
        for name, tensor in (*alike[0].named_parameters(recurse=False), *alike[0].named_buffers(recurse=False)):
            found.setdefault(id(tensor), (tensor, []))[1].extend((module, name) for module in alike)
    return list(found.values())


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


class _NumbersOnCPU(TorchFunctionMode):
    """Tensors of given numbers keep them: models read these back as settings of their layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        empty = bool(args) and isinstance(args[0], list) and not args[0]  # torch asks so for the default device
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.linspace) and not empty:
            kwargs.setdefault("device", CPU)
        return func(*args, **kwargs)

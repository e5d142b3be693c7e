"""An optimiser of sharded parameters: each rank updates its own rows, as if they were parameters of their own.

torch's optimisers also take DTensors, some of them, and spend longer on finding out how to handle each than on the
update itself. What such an optimiser does to a parameter must not depend on rows that other ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laststep.checkpoint.shards import Like, is_distributed, local_of
from laststep.config.checks import NOT_BY_ROWS, NOT_BY_ROWS_WHY
from laststep.config.errors import ConfigError
from laststep.optim.build import needs_other_rows

# On a CPU torch's fused optimisers compute the elements at the end of a tensor that do not fill a vector in float64.
WHOLE_VECTORS = 64  # bytes: the widest


class Rows:
    """The rows that an optimiser updates on this rank, in place of its sharded parameters."""

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
                    known = self._wrapped[number, name] = value, _sharded_like(whole, self._rows_in(value, whole))
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


def _sharded_like(whole: nn.Parameter, rows: Tensor) -> Tensor:
    assert isinstance(whole, DTensor)
    mesh, shape, stride = whole.device_mesh, whole.shape, whole.stride()
    return DTensor.from_local(rows, mesh, whole.placements, run_check=False, shape=shape, stride=stride)


def _check(optimizer: Optimizer, task: str) -> None:
    """Raise ConfigError unless this optimiser can update rows."""
    kind, made = type(optimizer), f"task={task}: optimizer()"
    if any(base.__name__.lower() in NOT_BY_ROWS for base in kind.__mro__) or needs_other_rows(optimizer):
        raise ConfigError(f"{made}: {kind.__name__} {NOT_BY_ROWS_WHY}, so train.sharding cannot shard it")
    if (kind.state_dict, kind.load_state_dict) != (Optimizer.state_dict, Optimizer.load_state_dict):
        raise ConfigError(
            f"{made}: {kind.__name__} has a state_dict of its own, of which train.sharding cannot tell what are rows"
        )

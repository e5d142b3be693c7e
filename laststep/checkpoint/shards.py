"""Tensors of which each rank holds some rows: DTensors under Shard(0), as FSDP2 makes them.

In the run of bytes of the full tensors, such a rank holds one contiguous range of each. Which one is computed from the
tensor's shape and the number of shards, see `shard_rows`. All other tensors belong to shard 0.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from laststep.ranks.world import shard_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Like(NamedTuple):
    """Stands in `live` for tensors that do not exist yet, see `SharedCheckpoint.load`: those below it with the shape of
    this DTensor are to be sharded like it, as an optimiser's averages are like their parameter."""

    tensor: Tensor


def is_distributed(value: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor. Its module takes long to import, and where nobody has imported it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def shard_count(tensor: Tensor) -> int:
    """Over how many shards the rows of a tensor are spread; 0 for one that each rank holds whole. Raises ValueError for
    a tensor that is cut in any other way."""
    if not is_distributed(tensor):
        return 0
    cuts = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not cuts:
        return 0
    if len(cuts) > 1 or not tensor.placements[cuts[0]].is_shard(0):
        raise ValueError(f"a tensor is placed as {tensor.placements}; only rows can be sharded, over one dimension")
    return int(tensor.device_mesh.size(cuts[0]))


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    if not is_distributed(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def new_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor, sharded like this one."""
    local = torch.empty_like(local_of(tensor), dtype=dtype, memory_format=torch.contiguous_format)
    return sharded_like(tensor, local)


def sharded_like(whole: Tensor, rows: Tensor) -> Tensor:
    """A tensor of the shape of this DTensor, sharded like it, of which this rank has these rows."""
    from torch.distributed.tensor import DTensor

    assert is_distributed(whole)
    mesh, shape, stride = whole.device_mesh, whole.shape, whole.stride()
    return DTensor.from_local(rows, mesh, whole.placements, run_check=False, shape=shape, stride=stride)


def range_of(tensor: Tensor, shard: int, shards: int) -> tuple[int, int]:
    """Where the rows of a shard begin and end in the bytes of a full tensor in C order."""
    begin, end = shard_rows(len(tensor), shard, shards)
    row = tensor.nbytes // max(len(tensor), 1)
    return begin * row, end * row

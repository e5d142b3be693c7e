"""Cuts a model into shards by FSDP2: which parts are gathered together, and in which precision.

It takes a second to import, so it is imported only where a model is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from laststep import compat
from laststep.checkpoint.shards import shard_count
from laststep.config.config import Config
from laststep.config.errors import ConfigError, first_line
from laststep.loops.blocks import repeated_blocks
from laststep.ranks.group import Group, make_mesh
from laststep.ranks.world import ShardPlace
from laststep.task import Task

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

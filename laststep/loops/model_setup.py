"""Prepares a Task's model for training: memory format, average, activation checkpointing, torch.compile, shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laststep.compat import compiler
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import Train
from laststep.data.order import seed_generators, seed_of
from laststep.loops.average import Average
from laststep.loops.blocks import checkpoint_activations, repeated_blocks
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace
from laststep.say import say
from laststep.task import Task


def prepare_model(task: Task, config: Config, group: Group, place: ShardPlace) -> tuple[nn.Module, Average | None]:
    """The task's model on its device, as `config` asks for it, and its moving average if there is one. Where they are
    sharded, this is a collective. Raises ConfigError."""
    if place.shards > 1:
        return _sharded(task, config, group, place)
    train, device = config.train, group.device
    model = task.model().to(device)
    if train.channels_last:
        model.to(memory_format=torch.channels_last)
    average = Average(model, train.ema_decay, device) if train.ema_decay else None
    if train.activation_checkpointing:
        checkpoint_activations(model, train.compile)
    if train.compile:
        if train.cuda_graphs:
            compiler.compile_whole_under_ddp()  # fewer launches; and each forward pass is one graph, as torch expects
        model.compile(dynamic=False, mode="reduce-overhead" if train.cuda_graphs else None)
    return model, average


def _sharded(task: Task, config: Config, group: Group, place: ShardPlace) -> tuple[nn.Module, Average | None]:
    """The same, without memory for more than this rank's shards."""
    from laststep.loops.fsdp import shard  # takes a second to import
    from laststep.loops.initial_values import build

    train, device, seed = config.train, group.device, seed_of("model", config.seed)
    model, values = build(task.model, lambda: seed_generators(seed, device), says=group.world.rank == 0)
    average = Average(model, train.ema_decay, None) if train.ema_decay else None
    models = [model] if average is None else [model, average.module]
    if values is not None:
        values.note(models)
    if train.activation_checkpointing:
        checkpoint_activations(model, train.compile)
    if train.compile:
        for block in repeated_blocks(model):  # one compiled part would gather all weights at once
            block.compile(dynamic=False)
    shard(models, task, config, group, place)
    if values is not None:
        values.fill(models, place, device)
    if average is not None:
        average.n_averaged = average.n_averaged.to(device)
    return model, average


def check_gradients(model: nn.Module, task: str) -> None:
    """Raise ConfigError unless this model of `task` has gradients, and only dense ones."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"task={task}: no parameter of the model requires a gradient, so none can be trained; "
            "leave some unfrozen in model()"
        )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"task={task}: {name or 'the model'} is an {type(module).__name__} with sparse=True, but sparse "
                "gradients cannot be checked and clipped like others; remove sparse=True"
            )


def report_cuda_graphs(train: Train, group: Group) -> None:
    """After the warm-up: say if torch has left out CUDA graphs that it should have recorded, which it does silently."""
    if train.cuda_graphs and group.world.rank == 0 and not compiler.has_cuda_graphs(group.device):
        say(
            "WARNING: train.cuda_graphs=true: torch has recorded no CUDA graphs of this model, or not of all of it; "
            "with TORCH_LOGS=cudagraphs in the environment it says why"
        )


def channels_last(tensor: Tensor) -> Tensor:
    """An image (4 dimensions) as NHWC in memory; any other tensor unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

"""Prepares a Task's model for training: memory format, averaged copy, activation checkpointing, torch.compile, DDP."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer import compat
from trainer.config.schema import Train
from trainer.loops.average import Average
from trainer.world.group import Group
from trainer.world.tree_sum import TreeHook


def prepare_model(model: nn.Module, train: Train, device: torch.device) -> tuple[nn.Module, Average | None]:
    """The model on its device, as `train` asks for it, and its moving average if there is one."""
    model = model.to(device)
    if train.channels_last:
        model.to(memory_format=torch.channels_last)
    average = Average(model, train.ema_decay, device) if train.ema_decay else None
    if train.activation_checkpointing:
        _checkpoint_activations(model, train.compile)
    if train.compile:
        # Static shapes: dynamic ones depend on the shapes seen before, and so on where the run was resumed.
        model.compile(dynamic=False)
    return model, average


def data_parallel(model: nn.Module, loss_tap: nn.Parameter, group: Group, train: Train) -> nn.Module:
    """The model in DistributedDataParallel, which also sums the gradient of `loss_tap`; one rank: the model itself."""
    if group.world.size == 1:
        if not (train.shares and train.compile):
            return model
        group.connect_alone()  # torch compiles a model within DDP into other graphs: one for each bucket
    parallel = DistributedDataParallel(
        _WithLossTap(model, loss_tap),
        device_ids=[group.device] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=lays_in_buckets(train, group.device),
        **compat.no_buffer_sync(),  # `Buffers` broadcasts them instead
    )
    if train.shares:
        TreeHook(group.world.size, group.device).register(parallel)
    return parallel


def lays_in_buckets(train: Train, device: torch.device) -> bool:
    """Whether DDP leaves the gradients in its buckets, which saves a copy. On a GPU the order of a sum over a gradient,
    such as its norm, depends on how its memory is aligned: with shares it stays where one rank has it, too."""
    return device.type != "cuda" or not train.shares


def no_reduction(parallel: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keep gradients on the rank: for all micro-batches but the last."""
    return parallel.no_sync() if isinstance(parallel, DistributedDataParallel) else contextlib.nullcontext()


def channels_last(tensor: Tensor) -> Tensor:
    """An image (4 dimensions) as NHWC in memory; any other tensor unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class _WithLossTap(nn.Module):
    """What DDP wraps: the model and the loss tap, see Learner._backward."""

    def __init__(self, model: nn.Module, loss_tap: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.loss_tap = loss_tap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def _checkpoint_activations(model: nn.Module, compiled: bool) -> None:
    """Recompute the repeated blocks (residual blocks, encoder layers) in the backward pass; a model without repeated
    blocks recomputes its children."""
    kinds = Counter(type(m) for m in model.modules() if not type(m).__module__.startswith("torch.nn."))
    blocks = [m for m in model.modules() if kinds[type(m)] > 1]
    inner = {id(m) for block in blocks for m in block.modules() if m is not block}
    chosen = {id(m) for m in blocks or model.children() if id(m) not in inner}
    # torch.compile does its own recomputation, which does not repeat such side effects.
    contexts = None if compiled else lambda: _statistics_once(model)
    compat.checkpoint_activations(model, lambda m: id(m) in chosen, contexts)


def _statistics_once(model: nn.Module) -> tuple[contextlib.AbstractContextManager[None], ...]:
    """Contexts for the forward pass and for its recomputation, in which batch norm must not count the batch again."""

    @contextlib.contextmanager
    def recomputation() -> Iterator[None]:
        norms = [m for m in model.modules() if compat.is_batch_norm(m)]
        before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, batches) in zip(norms, before):
                norm.momentum, norm.num_batches_tracked = momentum, batches

    return contextlib.nullcontext(), recomputation()

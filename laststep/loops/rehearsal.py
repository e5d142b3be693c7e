"""A rehearsal before a model's first step, so that DistributedDataParallel adds gradients in the same order in every
attempt.

DDP changes the layout of its gradient buckets after its first backward pass, and with three ranks or more the order of
a sum depends on the layout. A resumed run would take one step with the first layout that the undisturbed run took with
the second. So in every attempt the first forward pass is preceded by one on the same batch, whose backward pass sends
zeros. One and two ranks need none: a sum of two is the same in either order.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laststep.compat import tree_leaves, tree_map
from laststep.ranks.group import is_peer_loss

FAILED = (
    "the rehearsal failed: with three or more ranks, a custom loop's first batch goes through the model once more in "
    "advance, forward and backward, with the error above. If the model does not allow that, train.rehearsal=false "
    "leaves it out; the last bits of a resumed run may then differ"
)


def rehearse(module: nn.Module, ddp: DistributedDataParallel, device: torch.device) -> None:
    """Rehearse the first forward pass of training. `module` is `ddp` itself or wraps it, and is what the user calls."""

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            hook.remove()
            try:
                _rehearse(module, ddp, device, args, kwargs)
            except Exception as error:
                if is_peer_loss(error):
                    raise
                raise RuntimeError(FAILED) from error

    hook = module.register_forward_pre_hook(before_forward, with_kwargs=True)


def rehearse_without_forward(ddp: DistributedDataParallel) -> None:
    """Fix the layout of the buckets now, without the model's own forward pass: for a framework whose model may not be
    called twice. The layout is that of parameters which are used in the order of their registration."""
    if dist.get_world_size() <= 2:
        return
    module, parameters = ddp.module, [each for each in ddp.parameters() if each.requires_grad]
    module.forward = lambda: sum(each.flatten()[:0].sum().float() for each in parameters)
    try:
        for _ in range(2):  # DDP changes the layout at the beginning of its second forward pass
            ddp().backward()
    finally:
        del module.forward
    for parameter in parameters:
        parameter.grad = None


def _rehearse(
    module: nn.Module, ddp: DistributedDataParallel, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A forward and a backward pass that change nothing but the layout of the buckets."""
    gradients = [parameter.grad for parameter in module.parameters()]
    buffers = [buffer.clone() for buffer in module.buffers()]
    generators = random.getstate(), numpy.random.get_state()
    syncs, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, True  # off within no_sync()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        args, kwargs = tree_map(_copy, (args, kwargs))
        outputs = [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor)]
        differentiable = [output for output in outputs if output.requires_grad]
        if not differentiable:
            raise TypeError("found no tensor that requires a gradient in what the model returned")
        torch.autograd.backward(differentiable, [torch.zeros_like(output) for output in differentiable])
    ddp.require_backward_grad_sync = syncs
    random.setstate(generators[0])
    numpy.random.set_state(generators[1])
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers):
            buffer.copy_(before)
    for parameter, gradient in zip(module.parameters(), gradients):
        parameter.grad = gradient


def _copy(value: Any) -> Any:
    """A copy of a tensor, for the rehearsal to change and to receive its gradient; any other value unchanged."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

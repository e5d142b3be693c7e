"""A rehearsal before a model's first step: DistributedDataParallel shall add up gradients alike in every attempt.

After its first backward pass it lays out its gradient buckets anew, and from three ranks on the order of a sum depends
on the layout. A resumed run would so take one step with the first layout that the undisturbed run took with the second.
So the first forward pass of every attempt is preceded by one, on the same batch, whose backward pass sends zeros.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.compat import tree_leaves, tree_map


def rehearse(module: nn.Module, ddp: DistributedDataParallel, device: torch.device) -> None:
    """Have the first forward pass of training rehearsed. `module` is what is called, `ddp` itself or around it."""

    def before(_: nn.Module, words: tuple[Any, ...], more: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            hook.remove()
            _rehearse(module, ddp, device, words, more)

    hook = module.register_forward_pre_hook(before, with_kwargs=True)


def _rehearse(
    module: nn.Module, ddp: DistributedDataParallel, device: torch.device, words: tuple[Any, ...], more: dict[str, Any]
) -> None:
    """A forward and a backward pass that leave nothing but the layout of the buckets."""
    gradients = [parameter.grad for parameter in module.parameters()]
    buffers = [buffer.clone() for buffer in module.buffers()]
    generators = random.getstate(), numpy.random.get_state()
    syncs, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, True  # off within no_sync()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        words, more = tree_map(_copy, (words, more))
        outputs = [leaf for leaf in tree_leaves(module(*words, **more)) if isinstance(leaf, Tensor)]
        learned = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(learned, [torch.zeros_like(output) for output in learned])
    ddp.require_backward_grad_sync = syncs
    random.setstate(generators[0])
    numpy.random.set_state(generators[1])
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers):
            buffer.copy_(before)
    for parameter, gradient in zip(module.parameters(), gradients):
        parameter.grad = gradient


def _copy(word: Any) -> Any:
    """Of a tensor, one that the real pass will not see changed, and whose gradient ends here."""
    return word.detach().clone().requires_grad_(word.requires_grad) if isinstance(word, Tensor) else word

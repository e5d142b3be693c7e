"""The private names behind torch's autograd and its optimisers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def backward(loss: Tensor, leaf: Tensor | None = None, gradient: Tensor | None = None) -> None:
    """`loss.backward()` or, with a leaf, `torch.autograd.backward([loss, leaf], [None, gradient])`.

    It leaves out torch's checks, which take as long as a small backward pass itself. With two roots they also import
    sympy, to compare the shapes of a tensor and its gradient: that would take a rank half a second at its first step.
    """
    roots = (loss,) if leaf is None else (loss, leaf)
    if type(loss) is not Tensor or loss.numel() != 1 or not loss.is_floating_point():
        return torch.autograd.backward(roots, (None, gradient)[: len(roots)])  # which says what is wrong
    ones = torch.ones_like(loss, memory_format=torch.preserve_format)
    gradients = (ones,) if leaf is None else (ones, gradient)
    _engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()`. It leaves out what torch puts around the method of the class for hooks and its profiler,
    where there are no hooks: for a small model that takes as long as the update itself."""
    method = type(optimizer).step
    plain = getattr(method, "__wrapped__", None)
    if (
        not hasattr(method, "hooked")  # what torch has wrapped; the user may have replaced it, or wrapped it once more
        or hasattr(plain, "hooked")
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    ):
        optimizer.step()
    else:
        plain(optimizer)  # type: ignore[misc]

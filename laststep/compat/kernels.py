"""The private names behind torch's autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

set_grad_enabled = torch._C._set_grad_enabled  # a function; torch.set_grad_enabled makes an object in each call


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


States = Sequence[Mapping[str, Tensor]]  # what an optimiser keeps for each parameter


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether step() calls any hook, of this optimizer or of all."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def fused_sgd(
    group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor], states: States, found_inf: Tensor | None
) -> None:
    """What SGD(fused=True).step() does to the parameters of a group after its first step."""
    torch._fused_sgd_(
        params,
        grads,
        [state["momentum_buffer"] for state in states] if group["momentum"] else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        found_inf=found_inf,
    )


def fused_adam(
    group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor], states: States, found_inf: Tensor | None
) -> None:
    """What Adam(fused=True).step() and AdamW's do to the parameters of a group after its first step."""
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        found_inf=found_inf,
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))

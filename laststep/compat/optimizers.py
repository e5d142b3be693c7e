"""The private names behind torch's fused optimisers: their kernels, and the hooks of `step()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

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

"""The private names behind torch's autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

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

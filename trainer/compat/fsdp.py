"""The private names of torch that sharded training uses; the others are beside it.

Nothing is imported at the top, and no other part of Laststep may use a private name of a library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer


def set_found_inf(scaler: GradScaler, optimizer: Optimizer, found_inf: Tensor) -> None:
    """Let `scaler.step` act as after an `unscale_` that has found this flag, a scalar on the device. torch's own would
    ask the other ranks in the middle of the update."""
    from torch.amp.grad_scaler import OptState

    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found_inf.device: found_inf}
    state["stage"] = OptState.UNSCALED


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a scalar on the device, in one call."""
    import torch

    torch._foreach_mul_(tensors, factor)

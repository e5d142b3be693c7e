"""Whether the loss and the gradient of a step are finite, found by reading as little memory as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from laststep import compat

ZEROS = 256


class FiniteCheck:
    """Checks the gradients of these parameters, and of `loss_tap`, whose gradient is the loss.

    `in_buckets` is True if DDP lays the gradients in its flat buckets. One large tensor is checked faster than many
    small ones.
    """

    def __init__(self, loss_tap: nn.Parameter, parameters: Sequence[nn.Parameter], in_buckets: bool) -> None:
        self._loss_tap = loss_tap
        self._parameters = [loss_tap, *parameters]
        # In other types the norm of finite gradients may be infinite: in fp16 itself, for fp64 as the fp32 that it is
        # logged as. In these it is so only where the gradient is beyond any use.
        self._one_type = len({p.dtype for p in self._parameters}) == 1
        self._norm_suffices = all(p.dtype in (torch.float32, torch.bfloat16) for p in parameters)
        self._in_buckets = in_buckets
        self._addresses: list[int] = []  # of the gradients that `_buckets` are made of
        self._buckets: list[Tensor] = []
        self._one = torch.ones((), device=loss_tap.device)
        self._zeros: Iterator[Tensor] = iter(())  # scalars made in advance, one for each of the next steps

    def nonfinite(self, norm: Tensor | None, loss_alone: bool) -> Tensor:
        """1.0 if the loss or a gradient holds an infinity or a NaN, else 0.0; a scalar on the device.

        `norm` is that of the whole gradient, in fp32, if it has been computed. `loss_alone` leaves out the gradient.
        """
        loss = self._loss_tap.grad
        assert loss is not None
        if loss_alone:
            checked = [loss]
        elif norm is not None and self._norm_suffices:
            checked = [loss, norm]
        else:
            checked = self._gradients()
        found = self._zero()
        for tensors in [checked] if self._one_type else _by_type(checked):
            compat.note_nonfinite(tensors, found, self._one)
        return found

    def _zero(self) -> Tensor:
        """A new scalar, in a quarter of the time of torch.zeros, and on a GPU without a kernel."""
        zero = next(self._zeros, None)
        if zero is None:
            self._zeros = iter(torch.zeros(ZEROS, device=self._one.device).unbind())
            zero = next(self._zeros)
        return zero

    def _gradients(self) -> list[Tensor]:
        """All gradients, those in buckets as whole buckets."""
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        if not self._in_buckets:
            return gradients
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses != self._addresses:  # at the first step, and whenever DDP has made other buckets
            self._addresses, self._buckets = addresses, buckets_of(gradients)
        return self._buckets or gradients


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[tensor for tensor in tensors if tensor.dtype is dtype] for dtype in {t.dtype: None for t in tensors}]


def buckets_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The memory in which these gradients lie, as flat tensors; an empty list if anything else lies there too."""
    storages = {gradient.untyped_storage().data_ptr(): gradient for gradient in gradients}
    buckets = [torch.empty(0, dtype=g.dtype, device=g.device).set_(g.untyped_storage()) for g in storages.values()]
    are_full = sum(bucket.numel() for bucket in buckets) == sum(gradient.numel() for gradient in gradients)
    return buckets if are_full else []

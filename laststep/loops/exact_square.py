"""The squared norm of a gradient that is cut by rows, with bits that do not depend on where it is cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WINDOWS = 3
MANTISSA = 53  # bits of a float64
LOWEST = -900  # rows below 2 ** LOWEST count as nothing, and all numbers here stay in the range of float64


class ExactSquare:
    """Sums the squares of a gradient, of which each rank has some rows.

    The squares in a row are added in a tree, on the rank that has the row. The sum over all rows is exact, so its order
    is free, see Demmel and Nguyen, "Fast reproducible floating-point summation" (2013): the bits of these numbers are
    cut at fixed places into windows, so narrow that a float64 holds the sum of one window over all rows without
    rounding. A rank sums its three highest windows. What lies below is left out, at most 2 ** -2w of the largest row
    for each row, with windows of w bits: a part of 2 ** -24 of the sum with 2 ** 27 rows, 2 ** -46 with 2 ** 20.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """`rows` is how many rows all gradients have together, on all ranks."""
        self._width, self._device = MANTISSA - rows.bit_length(), device

    def of(self, gradients: Sequence[Tensor]) -> Tensor:
        """What `total` needs to know of a rank's rows: the number of its highest window, and the sums of its windows.
        All float64."""
        squares = [row_squares(gradient) for gradient in gradients]
        rows = torch.cat(squares or [torch.zeros(1, device=self._device)]).double()
        exponent = (rows.amax().view(torch.int64) >> MANTISSA - 1) - 1023  # of the largest; of 0 it is the least
        top = exponent.clamp(min=LOWEST).div(self._width, rounding_mode="floor")
        sums = [top.double()]
        for window in range(WINDOWS):
            unit = _power_of_two((top - window) * self._width)
            digits = (rows / unit).floor()
            rows = rows - digits * unit
            sums.append(digits.sum())
        return torch.stack(sums)

    def total(self, ranks: Tensor) -> Tensor:
        """The sum of all squares, not finite if a gradient is not. `ranks` has a row for each rank."""
        top = ranks[:, 0].amax()
        window = (top - ranks[:, :1]) + torch.arange(WINDOWS, device=ranks.device)  # counted from the highest of all
        total = torch.zeros_like(top)
        for number in reversed(range(WINDOWS)):
            digits = ranks[:, 1:].where(window == number, 0).sum()
            total = total + digits * _power_of_two(((top - number) * self._width).long())
        return total


def row_squares(gradient: Tensor) -> Tensor:
    """The sum of the squares of each row, added in an order that depends on the length of a row alone: torch's own sums
    depend on the shape of a tensor."""
    squares = gradient.reshape(len(gradient), -1)
    squares = (squares if squares.itemsize >= 4 else squares.float()).square()
    while (length := squares.shape[1]) > 1:
        half = length // 2
        folded = squares[:, :half] + squares[:, half : 2 * half]
        if length % 2:
            folded[:, 0] += squares[:, -1]
        squares = folded
    return squares[:, 0]


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent, exactly: torch's own powers may be rounded."""
    return (exponent + 1023 << MANTISSA - 1).view(torch.float64)

"""Axes: the position of a value on its axis, and the round values at which the axis has ticks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

MINUTE, HOUR, DAY = 60, 3600, 86400
TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 28, 56, 112, 365)),
)
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
LOG_FROM = 30.0  # a linear axis would hide the end of a loss that falls by more than this factor


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; logarithmic when `log`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """The position of a value, in percent of the axis."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return 100 * (value - low) / (high - low)

    @property
    def marks(self) -> list[tuple[float, str]]:
        """The ticks with their labels, all in one unit: 0.05, 800, 20k, 1.5M."""
        largest = max(map(abs, self.ticks), default=0.0)
        size, letter = next(((s, u) for s, u in UNITS if largest >= s * 10 or largest >= s >= 1e6), (1.0, ""))
        if self.log:
            size, letter = 1.0, ""
        return [(at, f"{at / size:.6g}{letter if at else ''}") for at in self.ticks]

    @classmethod
    def along(cls, values: Iterable[float]) -> Axis:
        """An x axis for steps or epochs: from the smallest value to the largest, with ticks at whole numbers."""
        low, high = _ends(values)
        return cls(low, high, tuple(_multiples(low, high, max(1, _round_step((high - low) / 7)))))

    @classmethod
    def up(cls, values: Iterable[float], from_zero: bool = False) -> Axis:
        """A y axis that begins and ends at a tick."""
        low, high = _ends([0.0, *values] if from_zero else values)
        step = _round_step((high - low) / 4)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return cls(low, high, tuple(_multiples(low, high, step)))

    @classmethod
    def up_log(cls, values: Iterable[float]) -> Axis:
        """A logarithmic y axis for positive values, with ticks at powers of ten."""
        low, high = _ends(values)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        apart = max(1, len(decades) // 6)
        marks = [10.0**n for n in decades if n % apart == 0]
        return cls(low / 1.2, high * 1.2, tuple(mark for mark in marks if low / 1.2 <= mark <= high * 1.2), log=True)

    @classmethod
    def of_time(cls, start: float, end: float) -> Axis:
        """An x axis between two times in Unix seconds, with ticks at round local times."""
        end = max(end, start + 1)
        step = next((s for s in TIME_STEPS if (end - start) / s <= 6), TIME_STEPS[-1])
        offset = time.localtime(start).tm_gmtoff
        return cls(start, end, tuple(at - offset for at in _multiples(start + offset, end + offset, step)))


def clock(at: float, length_s: float) -> str:
    """The label of a time on an axis of this length, in local time."""
    form = "%H:%M:%S" if length_s <= 10 * MINUTE else "%H:%M" if length_s <= DAY else "%b %d %H:%M"
    return time.strftime(form if length_s <= 6 * DAY else "%b %d", time.localtime(at))


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest value, moved apart if they are equal."""
    known = list(values)
    low, high = min(known), max(known)
    return (low, high) if high > low else (low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1))


def _round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `least`."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * n for n in (1, 2, 5, 10) if size * n >= least * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` from `low` to `high`."""
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]

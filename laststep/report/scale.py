"""The axis of wall-clock time, and its round ticks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

MINUTE, HOUR, DAY = 60, 3600, 86400
TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 28, 56, 112, 365)),
)


@dataclass(frozen=True)
class TimeAxis:
    """From `low` to `high`, in Unix seconds."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The position of a time, in percent of the axis."""
        return 100 * (value - self.low) / (self.high - self.low)

    @classmethod
    def between(cls, start: float, end: float) -> TimeAxis:
        """With ticks at round local times."""
        end = max(end, start + 1)
        step = next((s for s in TIME_STEPS if (end - start) / s <= 6), TIME_STEPS[-1])
        offset = time.localtime(start).tm_gmtoff
        first, last = math.ceil((start + offset) / step), math.floor((end + offset) / step)
        return cls(start, end, tuple(n * step - offset for n in range(first, last + 1)))


def clock(at: float, length_s: float) -> str:
    """The label of a time on an axis of this length, in local time."""
    form = "%H:%M:%S" if length_s <= 10 * MINUTE else "%H:%M" if length_s <= DAY else "%b %d %H:%M"
    return time.strftime(form if length_s <= 6 * DAY else "%b %d", time.localtime(at))

"""AutoInterval, for checkpoint.every_minutes=auto: how often to save.

The interval follows from what a save costs and how often an attempt fails. The cost is measured: the time that the loop
stood still, and how much slower the steps were while the save was written. The failures are those that the run has had
so far, on any number of nodes; before the first one, `NODE_MTBF_S` is the estimate.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable

from laststep.records.attempt_record import EndedAttempt
from laststep.records.retry import FAILURES

# Bounds of the interval in seconds. Where failures are rare, an hour costs little when one does happen, and saves that
# are an hour apart cost next to nothing.
LEAST_S, MOST_S = 60.0, 3600.0
RECENT_SAVES = 5  # the cost of a save is the median over these
REPORT_FACTOR = 1.5  # a change of the interval by this factor is worth a line in the log


class AutoInterval:
    """The time from the start of one save to the start of the next. Every rank has one; rank 0's decides."""

    def __init__(self, ends: Iterable[EndedAttempt], nodes: int, say: Callable[[str], None]) -> None:
        """`ends` are the records of the run's earlier attempts, `nodes` the number of nodes of this one."""
        ends = list(ends)
        self._failures = sum(map(_might_lose_steps, ends))
        self._node_s = sum((end["end"] - end["start"]) * len(end["hosts"]) for end in ends)
        self._nodes = nodes
        self._began = time.monotonic()
        self._say = say
        self._reported_s = 0.0  # the interval in the last line of the log
        self._costs: deque[float] = deque(maxlen=RECENT_SAVES)
        self._stall_s: float | None = None  # of the last save, until its cost is known
        # Lists of (steps, seconds): done while the last save was written, and while none was.
        self._steps_while_saving: list[tuple[int, float]] = []
        self._steps_alone: deque[tuple[int, float]] = deque(maxlen=100)

    @property
    def seconds(self) -> float:
        """The interval. The first save comes early: it shows what a save costs, and that the disk accepts it."""
        if not self._costs:
            return LEAST_S
        return best_interval(statistics.median(self._costs), self._mtbf_s())

    def add_stall(self, seconds: float) -> None:
        """The loop stood still for `seconds` to start a save."""
        self._complete_measurement()
        self._stall_s = seconds

    def add_steps(self, steps: int, seconds: float, saving: bool) -> None:
        """`steps` took `seconds`; `saving` says whether a save was being written meanwhile."""
        if not steps:
            return
        if saving:
            self._steps_while_saving.append((steps, seconds))
        else:
            self._complete_measurement()
            self._steps_alone.append((steps, seconds))

    def _complete_measurement(self) -> None:
        """Compute the cost of the last save, unless that has been done."""
        if self._stall_s is None:
            return
        steps, seconds = _totals(self._steps_while_saving)
        steps_alone, seconds_alone = _totals(self._steps_alone)
        slower_s = seconds - steps * seconds_alone / steps_alone if steps_alone else 0.0
        self._costs.append(self._stall_s + max(0.0, slower_s))
        self._stall_s = None
        self._steps_while_saving.clear()
        self._report()

    def _mtbf_s(self) -> float:
        """Mean time between failures of this attempt's number of nodes."""
        node_s = self._node_s + self._nodes * (time.monotonic() - self._began)
        return (node_s / self._failures if self._failures else max(NODE_MTBF_S, node_s)) / self._nodes

    def _report(self) -> None:
        """Log the interval and the reasons for it, unless it has hardly changed."""
        if self._reported_s / REPORT_FACTOR < self.seconds < self._reported_s * REPORT_FACTOR:
            return
        self._reported_s = self.seconds
        nodes = f"{self._nodes} node{'s' * (self._nodes > 1)}"
        failures = f"{self._failures} so far" if self._failures else "none so far, this is an estimate"
        self._say(
            f"saving every {self.seconds / 60:.3g} min: a save costs {statistics.median(self._costs):.2g} s, "
            f"mean time between failures {self._mtbf_s() / 3600:,.1f} h ({nodes}; {failures})"
        )


def best_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds from one save to the next if a save costs `save_s` and the mean time between failures is `mtbf_s`."""
    return min(max(daly(save_s, mtbf_s), LEAST_S), MOST_S)


def _totals(measured: Iterable[tuple[int, float]]) -> tuple[int, float]:
    """The sums of steps and seconds."""
    measured = list(measured)
    return sum(steps for steps, _ in measured), sum(seconds for _, seconds in measured)


def _might_lose_steps(end: EndedAttempt) -> bool:
    """Whether an attempt ended in a way that is a reason to save often.

    A failure counts even if the surviving ranks saved its last step: next time no rank may survive. A failure before
    the first step does not count, there was nothing to lose.
    """
    return end["lost_steps"] > 0 or (end["reason"] in FAILURES and end["end_step"] > end["start_step"])


# The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 per node.
NODE_MTBF_S = 54 * 86400 * (16384 / 8) / 419  # 264 days


def young(save_s: float, death_s: float) -> float:
    """The best time between two saves, by Young's first-order formula."""
    return math.sqrt(2 * save_s * death_s)


def daly(save_s: float, death_s: float) -> float:
    """The best time between the starts of two saves, by Daly's higher-order formula (tau_opt plus the save itself)."""
    if save_s >= 2 * death_s:
        return death_s + save_s
    ratio = save_s / (2 * death_s)
    return young(save_s, death_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)

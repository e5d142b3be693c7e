"""checkpoint.every_minutes=auto: how often to save, from what a save costs and how often an attempt fails.

What a save costs is measured: how long the loop stood still, and what the steps beside the write took longer than those
before it. How often an attempt fails is what the run has seen so far, of any number of nodes; until it has seen a
failure, what is known of others' nodes (`NODE_MTBF_S`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable

from trainer.checkpoint.goodput import NODE_MTBF_S, daly
from trainer.records.attempt_record import EndedAttempt
from trainer.records.retry import FAILURES

# Bounds, in seconds. An hour costs a death little where they are rare, and the few saves cost next to nothing.
LEAST_S, MOST_S = 60.0, 3600.0
RECENT = 5  # saves whose median cost counts
MUCH = 1.5  # times more or less often than last said is worth a line


class AutoInterval:
    """The time from the beginning of a save to that of the next. Of all ranks' it is rank 0's that counts."""

    def __init__(self, ends: Iterable[EndedAttempt], nodes: int, say: Callable[[str], None]) -> None:
        """`ends` are those of the run's attempts before this one, which is on so many `nodes`."""
        ends = list(ends)
        self._failures = sum(map(_might_lose_steps, ends))
        self._node_s = sum((end["end"] - end["start"]) * len(end["hosts"]) for end in ends)
        self._nodes = nodes
        self._began = time.monotonic()
        self._say = say
        self._said_s = 0.0
        self._costs: deque[float] = deque(maxlen=RECENT)
        self._stood_still_s: float | None = None  # for the save whose cost is not known yet
        self._beside: list[tuple[int, float]] = []  # it: stretches of (steps, seconds)
        self._alone: deque[tuple[int, float]] = deque(maxlen=100)  # stretches beside no save

    @property
    def seconds(self) -> float:
        """The interval. The first save comes early: it shows what one costs, and that the disk takes it."""
        if not self._costs:
            return LEAST_S
        return best_interval(statistics.median(self._costs), self._mtbf_s())

    def stood_still(self, seconds: float) -> None:
        """The loop did, to begin a save."""
        self._add_up()
        self._stood_still_s = seconds

    def stepped(self, steps: int, seconds: float, saving: bool) -> None:
        """So many steps took so long, with a save being written beside them or not."""
        if not steps:
            return
        if saving:
            self._beside.append((steps, seconds))
        else:
            self._add_up()
            self._alone.append((steps, seconds))

    def _add_up(self) -> None:
        """What the last save cost, if that is not known yet."""
        if self._stood_still_s is None:
            return
        steps, seconds = _sums(self._beside)
        steps_alone, seconds_alone = _sums(self._alone)
        slower_s = seconds - steps * seconds_alone / steps_alone if steps_alone else 0.0
        self._costs.append(self._stood_still_s + max(0.0, slower_s))
        self._stood_still_s = None
        self._beside.clear()
        self._tell()

    def _mtbf_s(self) -> float:
        """Mean time between failures of so many nodes."""
        node_s = self._node_s + self._nodes * (time.monotonic() - self._began)
        return (node_s / self._failures if self._failures else max(NODE_MTBF_S, node_s)) / self._nodes

    def _tell(self) -> None:
        """Say which interval it is and why, unless it is much as before."""
        if self._said_s / MUCH < self.seconds < self._said_s * MUCH:
            return
        self._said_s = self.seconds
        nodes = f"{self._nodes} node{'s' * (self._nodes > 1)}"
        failures = f"{self._failures} so far" if self._failures else "none so far, so an estimate"
        self._say(
            f"saving every {self.seconds / 60:.3g} min: a save costs {statistics.median(self._costs):.2g} s, "
            f"a failure comes every {self._mtbf_s() / 3600:,.1f} h ({nodes}; {failures})"
        )


def best_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds from save to save, where one costs `save_s` and a failure comes every `mtbf_s`."""
    return min(max(daly(save_s, mtbf_s), LEAST_S), MOST_S)


def _sums(stretches: Iterable[tuple[int, float]]) -> tuple[int, float]:
    """Steps and seconds of several."""
    stretches = list(stretches)
    return sum(steps for steps, _ in stretches), sum(seconds for _, seconds in stretches)


def _might_lose_steps(end: EndedAttempt) -> bool:
    """Whether an attempt ended in a way that is a reason to save often.

    A failure counts even if the ranks that were left saved its last step: next time there may be none. One before the
    first step does not, there was nothing to lose.
    """
    return end["lost_steps"] > 0 or (end["reason"] in FAILURES and end["end_step"] > end["start_step"])

"""run_time: a clock of the time in which this process could run, for deadlines.

Slurm suspends jobs (`scontrol suspend`, PreemptMode=SUSPEND, gang scheduling), and machines freeze. The clocks of the
system move on meanwhile, and every deadline that was set by them has passed when the process wakes.
"""

from __future__ import annotations

import os
import threading
import time

TICK_S = 0.25
# What a pause between two ticks counts at most. Threads of a starved process tick late; that costs it nothing either.
LONGEST_S = 1.0


class _Clock:
    """Counts, in a thread, the pauses between its ticks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted_s, self._ticked_at = 0.0, time.monotonic()
        threading.Thread(target=self._tick, name="clock", daemon=True).start()

    def read(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._counted_s += min(now - self._ticked_at, LONGEST_S)
            self._ticked_at = now
            return self._counted_s

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.read()


_clocks: list[_Clock] = []
os.register_at_fork(after_in_child=_clocks.clear)  # a child does not have the thread


def run_time() -> float:
    """Seconds in which this process could run, since some moment. It starts a thread; a child that is forked has a time
    of its own."""
    if not _clocks:
        _clocks.append(_Clock())
    return _clocks[0].read()

"""Calling a function if something takes too long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from laststep.ranks.process import start_thread
from laststep.ranks.run_time import run_time

ROUND_S = 0.5


class Alarm:
    """Calls `ring`, in a thread of its own, after `seconds` in which this process could run, unless it is cancelled."""

    def __init__(self, seconds: float, ring: Callable[[], object]) -> None:
        self._rings_at, self._ring = run_time() + seconds, ring
        self._cancelled = threading.Event()
        start_thread(threading.Thread(target=self._wait, name="alarm", daemon=True))

    def cancel(self) -> None:
        """What was waited for has come."""
        self._cancelled.set()

    def _wait(self) -> None:
        while (left_s := self._rings_at - run_time()) > 0:
            if self._cancelled.wait(min(left_s, ROUND_S)):
                return
        if not self._cancelled.is_set():
            self._ring()


@contextlib.contextmanager
def alarm(seconds: float, ring: Callable[[], object]) -> Iterator[None]:
    """Call `ring`, in a thread of its own, if the block takes longer than this."""
    running = Alarm(seconds, ring)
    try:
        yield
    finally:
        running.cancel()

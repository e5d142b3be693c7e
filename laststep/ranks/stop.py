"""Stopping together: after a signal, all ranks agree on a last step, and until then the agreement costs nothing.

The idea is that of JAX's preemption sync manager. Every rank counts ticks: units of work that all ranks do in step (a
training step, a validation batch). A rank that is signalled writes a notice to the key-value store. In every rank a
thread sleeps in C until that notice is there. Then it holds its rank before the next tick, publishes the rank's current
tick, waits for those of all ranks, and sets the last tick to the largest: no rank is past it, and every rank can reach
it.

Until a signal, the loop pays for one comparison of two integers per tick: no collective, no lock, no device access.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from laststep.config.errors import first_line
from laststep.ranks.process import Signals, run_time, start_thread
from laststep.ranks.world import World
from laststep.say import say

NO_LIMIT = sys.maxsize
FOREVER = timedelta(days=3650)
# A thread answers, however busy its rank's main thread is. So a rank that takes longer than this is dead or suspended.
ANSWER_S = 10.0
LOOK_S = 0.5  # how often a thread that waits for the answers looks whether it is no longer needed


class Stop:
    """The agreement on one attempt's last tick. The loop calls `begin_tick`. If the ranks cannot agree, `on_failure` is
    called with the reason, in another thread, and `begin_tick` never returns: no rank may train on."""

    def __init__(self, world: World, store: dist.Store, signals: Signals, on_failure: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self.noticed_at: float | None = None  # time.monotonic() at which this rank read the notice
        self.tick = 0
        self._world = world
        self._last_tick = NO_LIMIT  # -1 while the ranks agree
        self._agreed = threading.Event()
        self._closed = threading.Event()
        self._on_failure = on_failure
        # A client of TCPStore serves one caller at a time, so a thread that waits needs its own connection.
        self._notices = store.clone()
        self._waiting = store.clone()
        self._store = store
        self._thread = start_thread("stop", self._agree)
        signals.on_first(self._notify)

    def begin_tick(self) -> bool:
        """Begin the next unit of work; False if the ranks agreed to stop before it."""
        self.tick += 1
        return self.tick <= self._last_tick or self._wait()

    def await_agreement(self) -> None:
        """Wait until the ranks have agreed on the last tick: what is signalled here stops here."""
        self._agreed.wait()

    def close(self) -> None:
        """End the thread, even if it waits for a dead rank. Call once all ranks have left the loop: then there is no
        tick to agree on."""
        self._closed.set()
        with contextlib.suppress(dist.DistError):
            self._write_notice(self._store, 0)
        self._thread.join(timeout=5)

    def _wait(self) -> bool:
        """The slow path of `begin_tick`: the ranks are agreeing on the last tick, or have done so."""
        self._agreed.wait()
        return self.tick <= self._last_tick

    def _notify(self, number: signal.Signals) -> None:
        # If the store died with rank 0, the attempt has ended, or ends with the next collective.
        with contextlib.suppress(dist.DistError):
            self._write_notice(self._notices, number)
        say(f"rank {self._world.rank}: {number.name} received, stopping after this step")

    @staticmethod
    def _write_notice(store: dist.Store, number: int) -> None:
        """Write a notice unless there is one: every rank reads the same signal. 0 ends the threads."""
        store.compare_set("stop/notice", "", str(int(number)))

    def _agree(self) -> None:
        keys, number = [f"stop/tick/{rank}" for rank in range(self._world.size)], 0
        try:
            self._waiting.set_timeout(FOREVER)
            number = int(self._waiting.get("stop/notice"))
            if not number:
                return
            # The order of these two lines, and of the two in begin_tick, is the algorithm: the loop writes its tick
            # and then reads the limit, this thread writes the limit and then reads the tick. So either the loop sees
            # the limit, or this thread sees the tick that the loop has begun, or both do.
            self._last_tick = -1
            self._waiting.set(f"stop/tick/{self._world.rank}", str(self.tick))
            self.signal, self.noticed_at = signal.Signals(number), time.monotonic()
            ticks = self._answers(keys)
            if ticks is None:
                return
            self._last_tick = max(ticks)
        except dist.DistError as error:
            rank_0 = f"rank 0 on {self._world.host_of(0)} is gone: {first_line(error)}"
            self._on_failure((number and self._missing(keys)) or rank_0)
            return
        self._agreed.set()

    def _answers(self, keys: list[str]) -> list[int] | None:
        """The ticks of all ranks; None if this is closed meanwhile. Raises DistError after ANSWER_S."""
        deadline = run_time() + ANSWER_S
        self._waiting.set_timeout(timedelta(seconds=LOOK_S))
        while not self._closed.is_set():
            try:
                return [int(tick) for tick in self._waiting.multi_get(keys)]
            except dist.DistStoreError:
                if run_time() > deadline:
                    raise
        return None

    def _missing(self, keys: list[str]) -> str:
        """A message that names the ranks that did not answer; empty if the store does not answer either."""
        with contextlib.suppress(dist.DistError):
            absent = [str(rank) for rank, key in enumerate(keys) if not self._waiting.check([key])]
            if absent:
                return f"rank {', '.join(absent)} did not answer within {ANSWER_S:.0f} s of a signal"
        return ""

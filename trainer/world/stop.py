"""Stopping together: the ranks agree on a step after which all of them stop, and pay nothing until then.

The idea is that of JAX's preemption sync manager. Every rank counts ticks, a tick being a unit of work that all ranks
do alike (a training step, a validation batch). A rank that is signalled writes a notice to the store. In every rank a
thread waits for it, asleep in C. Once woken it holds its rank at the next tick's door, publishes the tick the rank is
in, waits for everyone's, and sets the last tick to the largest of them: nobody is past it, everybody can reach it.

Until then the loop pays for one comparison of two integers per tick: no collective, no lock, no look at the device.
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

from trainer.say import say
from trainer.world.signals import Signals
from trainer.world.world import World

NEVER = sys.maxsize
FOREVER = timedelta(days=3650)
# A thread answers, whatever its rank's main thread is busy with: a rank that does not within this is dead or halted.
ANSWER_S = 10.0


class Stop:
    """The agreement of one attempt; `begin_tick` is the loop's side of it. `on_failure` hears, in another thread, why
    no agreement was reached: then nobody may go on, and `begin_tick` does not return."""

    def __init__(self, world: World, store: dist.Store, signals: Signals, on_failure: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self.noticed_at: float | None = None  # time.monotonic() of the notice, on every rank
        self.tick = 0
        self._world = world
        self._last = NEVER  # -1 while the ranks agree
        self._agreed = threading.Event()
        self._on_failure = on_failure
        # A client of TCPStore serves one caller at a time, so a thread that waits needs a connection of its own.
        self._notices = store.clone()
        self._waiting = store.clone()
        self._store = store
        self._thread = threading.Thread(target=self._agree, name="stop", daemon=True)
        self._thread.start()
        signals.on_first(self._notify)

    def begin_tick(self) -> bool:
        """Count one more unit of work; False when the ranks agreed to stop before it."""
        self.tick += 1
        return self.tick <= self._last or self._wait()

    def close(self) -> None:
        """End the agreement. All ranks have left the loop: every one is past its last tick."""
        with contextlib.suppress(dist.DistError):
            self._write_notice(self._store, 0)
        self._thread.join(timeout=5)

    def _wait(self) -> bool:
        """The slow side of `begin_tick`: an agreement is under way, or was reached."""
        self._agreed.wait()
        return self.tick <= self._last

    def _notify(self, number: signal.Signals) -> None:
        # Where the store went with rank 0, the attempt has ended, or ends with the next collective.
        with contextlib.suppress(dist.DistError):
            self._write_notice(self._notices, number)
        say(f"rank {self._world.rank}: {number.name} received, stopping after this step")

    @staticmethod
    def _write_notice(store: dist.Store, number: int) -> None:
        """The first notice stands, so that every rank reads the same one."""
        store.compare_set("stop/notice", "", str(int(number)))

    def _agree(self) -> None:
        keys = [f"stop/tick/{rank}" for rank in range(self._world.size)]
        try:
            self._waiting.wait(["stop/notice"], FOREVER)
            number = int(self._waiting.get("stop/notice"))
            if not number:
                return
            # The order of these two lines, and of the two in begin_tick, is the algorithm: the loop writes its tick
            # and then reads the limit, this thread writes the limit and then reads the tick. So either the loop sees
            # the hold, or this thread sees the tick that the loop went on to; never neither.
            self._last = -1
            self._waiting.set(f"stop/tick/{self._world.rank}", str(self.tick))
            self.signal, self.noticed_at = signal.Signals(number), time.monotonic()
            self._waiting.wait(keys, timedelta(seconds=ANSWER_S))
            self._last = max(int(tick) for tick in self._waiting.multi_get(keys))
        except dist.DistError as error:
            self._on_failure(self._missing(keys) or f"the ranks could not agree on where to stop: {error}")
            return
        self._agreed.set()

    def _missing(self, keys: list[str]) -> str:
        """Who did not answer, if the store still knows."""
        with contextlib.suppress(dist.DistError):
            absent = [str(rank) for rank, key in enumerate(keys) if not self._waiting.check([key])]
            if absent:
                return f"rank {', '.join(absent)} did not answer within {ANSWER_S:.0f} s of a signal"
        return ""

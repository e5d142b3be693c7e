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
from datetime import timedelta

import torch.distributed as dist

from trainer.world.detect import World
from trainer.world.signals import Signals

NEVER = sys.maxsize
FOREVER = timedelta(days=3650)


class Stop:
    """The agreement of one attempt; `begin_tick` is the loop's side of it."""

    def __init__(self, world: World, store: dist.Store, signals: Signals, timeout_s: float) -> None:
        self.signal: signal.Signals | None = None
        self._world = world
        self._timeout = timedelta(seconds=timeout_s)
        self._tick = 0
        self._last = NEVER  # -1 while the ranks agree
        self._agreed = threading.Event()
        self._error: BaseException | None = None
        # A client of TCPStore serves one caller at a time, so a thread that waits needs a connection of its own.
        self._notices = store.clone()
        self._waiting = store.clone()
        self._store = store
        self._thread = threading.Thread(target=self._agree, name="stop", daemon=True)
        self._thread.start()
        signals.tell(self._notify)

    def begin_tick(self) -> bool:
        """Count one more unit of work; False when the ranks agreed to stop before it."""
        self._tick += 1
        return self._tick <= self._last or self._wait()

    def close(self) -> None:
        """End the agreement. All ranks have left the loop: every one is past its last tick."""
        with contextlib.suppress(dist.DistError):
            self._write_notice(self._store, 0)
        self._thread.join(timeout=5)

    def _wait(self) -> bool:
        """The slow side of `begin_tick`: an agreement is under way, or was reached."""
        self._agreed.wait()
        if self._error is not None:
            raise RuntimeError("the ranks could not agree on where to stop") from self._error
        return self._tick <= self._last

    def _notify(self, number: signal.Signals) -> None:
        # Where the store went with rank 0, the attempt has ended, or ends with the next collective.
        with contextlib.suppress(dist.DistError):
            self._write_notice(self._notices, number)
        print(f"[laststep] rank {self._world.rank}: {number.name} received, stopping after this step", flush=True)

    @staticmethod
    def _write_notice(store: dist.Store, number: int) -> None:
        """The first notice stands, so that every rank reads the same one."""
        store.compare_set("stop/notice", "", str(int(number)))

    def _agree(self) -> None:
        try:
            self._waiting.wait(["stop/notice"], FOREVER)
            number = int(self._waiting.get("stop/notice"))
            if not number:
                return
            # The order of these two lines, and of the two in begin_tick, is the algorithm: the loop writes its tick
            # and then reads the limit, this thread writes the limit and then reads the tick. So either the loop sees
            # the hold, or this thread sees the tick that the loop went on to; never neither.
            self._last = -1
            self._waiting.set(f"stop/tick/{self._world.rank}", str(self._tick))
            keys = [f"stop/tick/{rank}" for rank in range(self._world.size)]
            self._waiting.wait(keys, self._timeout)
            last = max(int(tick) for tick in self._waiting.multi_get(keys))
            self.signal = signal.Signals(number)
            self._last = last
        except BaseException as error:  # whatever it is, the loop must hear of it, not wait for ever
            self._error = error
        finally:
            self._agreed.set()

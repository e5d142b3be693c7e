"""The ring: the newest state that is whole in the device's memory, and what the host held of it.

While a GPU's step j waits for a dead rank's gradients, the CPU has queued the update of step j behind that collective,
and perhaps step j+1 as well. The device's memory holds exactly step j-1, but everything on the host has moved on. So
each update of the state has a slot: an event before it, an event after it, and the host's part of the state that it
left. A state is whole while the device has passed the end of its update, and not the beginning of the next one.

Three slots are enough: an update is queued only when the one before the last has ended on the device. That also bounds
how far the CPU runs ahead, to two steps. It does not keep the device's own queue from filling: CUDA takes about 1,024
kernels in advance, and a step of a large model launches thousands. The thread that trains then waits in the middle of a
launch, and the device may not answer any other thread. So all other threads ask it through `DeviceQueue.ask`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from laststep.ranks.device import DeviceQueue, is_due_to_capture
from laststep.ranks.process import run_time
from laststep.ranks.world import DeviceSilent

SLOTS = 3
DEVICE_S = 5.0  # how long a device may take to end an update that is queued
POLL_S = 0.002

Held = TypeVar("Held")


class _Slot(Generic[Held]):
    """One update of the state. The events count only where their flag is set: an event is recorded again and again."""

    def __init__(self, queue: DeviceQueue) -> None:
        # Around this rank's own work before the update: loading, and the passes that wait for no other rank.
        self.work_begin, self.work_end = queue.event(), queue.event()
        self.begin, self.end = queue.event(), queue.event()
        self.worked = self.counted = self.begun = self.ended = False
        self.held: Held | None = None  # None: nothing has been queued since, what the host holds is this state


class Ring(Generic[Held]):
    """The last updates of one rank's state. The thread that trains begins and ends them; any other thread may look."""

    def __init__(self, queue: DeviceQueue, hold: Callable[[], Held]) -> None:
        """`hold` returns what the host holds of the state, before the next update changes it."""
        self.busy_s = 0.0  # of the device's time, spent on this rank's own work
        self._queue = queue
        self._hold = hold
        self._slots = [_Slot[Held](queue) for _ in range(SLOTS)]
        self._newest = -1  # the number of the newest update that has begun, counted from 0, the restored state's
        self._passed = 0
        # Held for two assignments only. Between the two calls of an update no lock is held: the thread that trains may
        # wait there for the device, and so for a dead rank, in C.
        self._lock = threading.Lock()
        self._frozen = False
        self._chosen = -1
        self._waits = False  # whether the thread that trains waits for the device
        self._stopped = False  # whether it waits for the end of the process
        self._redone = False

    # In the thread that trains

    def begin_work(self) -> None:
        """The step begins with this rank's own work."""
        slot = self._slot(self._newest + 1)
        slot.worked = False
        slot.work_begin.record()

    def end_work(self) -> None:
        """From here on the step may wait for other ranks."""
        slot = self._slot(self._newest + 1)
        slot.work_end.record()
        slot.worked, slot.counted = True, False
        self._count(slot)

    def begin_update(self) -> None:
        """The state changes from here on. Once the ring is frozen this does not return."""
        number = self._newest + 1
        slot = self._slot(number)
        if number > 1:
            self._await_end(self._slot(number - 2))
        if number and self._queue.runs_ahead:
            self._slot(number - 1).held = self._hold()
        slot.begun, slot.ended, slot.held = False, False, None
        slot.begin.record()
        with self._lock:
            frozen = self._frozen
            if not frozen:
                slot.begun, self._newest = True, number
        if frozen:
            self._stop()  # nothing of this update is queued

    def end_update(self) -> None:
        """The state is whole again, once the device is here."""
        slot = self._slot(self._newest)
        slot.end.record()
        slot.ended = True

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """The state changes in this block."""
        self.begin_update()
        yield
        self.end_update()

    def await_newest(self) -> None:
        """Wait until the device has done the newest update, and let go of what the host held of the state before it.
        Once the ring is frozen this does not return."""
        if self._newest >= 0:
            with self.waiting():
                self._await_end(self._slot(self._newest))
            # A rescue may have done that update itself, and now the device has done it again. No rank may do an update
            # with what followed from that. None can without what this rank gathers at the end of the step under way.
            if self._frozen:
                self._stop()
            if self._newest:
                self._slot(self._newest - 1).held = None

    def _stop(self) -> None:
        self._stopped = True
        threading.Event().wait()  # the process ends

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the thread that trains only waits for the device. Once the ring is frozen, it goes no further
        than to its next wait, for the ring, the records or the copies."""
        self._waits = True
        yield  # a thread that has failed does not train on, and counts as one that waits
        self._waits = False

    def synchronize(self) -> None:
        """Wait until the device has done everything that is queued."""
        self._queue.synchronize()

    def _await_end(self, slot: _Slot[Held]) -> None:
        slot.end.synchronize()
        self._count(slot)
        slot.worked = False

    def _count(self, slot: _Slot[Held]) -> None:
        """Count the own work of a step once the device has done it, on a CPU at once."""
        if slot.worked and not slot.counted and slot.work_end.query():
            self.busy_s += slot.work_begin.elapsed_time(slot.work_end) / 1000
            slot.counted = True

    # In any thread

    def passed(self) -> int:
        """How far the device has come, as far as it says: grows with the own work and with the update of each step.
        Raises RuntimeError when the device has failed."""
        newest = self._newest

        def look() -> int:
            ends = (n + 1 for n in self._numbers(newest) if self._slot(n).ended and self._slot(n).end.query())
            ended = next(ends, 0)
            works = (n + 1 for n in (newest + 1, newest) if self._slot(n).worked and self._slot(n).work_end.query())
            return ended + max(next(works, 0), ended)

        try:
            self._passed = max(self._passed, self._queue.ask(look))  # the ring may have moved on meanwhile
        except DeviceSilent:
            pass  # it may answer later
        except RuntimeError as error:
            if not is_due_to_capture(error):
                raise
        return self._passed

    def freeze(self, timeout_s: float) -> bool:
        """Let no further update begin, and choose the newest whole state. False when there is none.

        Waits up to `timeout_s` for the thread that trains to end an update that the device has begun, and at least
        `DEVICE_S` for the device to do what is queued of it. Call it again when the state is not whole any more.
        Raises DeviceSilent.
        """
        with self._lock:
            self._frozen = True
        if self._redone:
            return self.is_whole()
        began = run_time()
        while self._newest >= 0:
            number, has_ended = self._queue.ask(self._look)
            if has_ended:
                self._chosen = number
                return True
            # None has begun: the device went on between two queries, and the thread that trains has taken its slot.
            on_host = number >= 0 and not self._slot(number).ended
            if run_time() - began >= (timeout_s if on_host else max(timeout_s, DEVICE_S)):
                break
            time.sleep(POLL_S)
        return False

    @property
    def held(self) -> Held | None:
        """What the host held of the chosen state; None: what it holds now."""
        return None if self._redone or self._chosen == self._newest else self._slot(self._chosen).held

    def await_thread(self, timeout_s: float) -> bool:
        """Wait until the thread that trains waits too, for as long as the chosen state is whole. Call after `freeze`.
        False if it has not come to that."""
        deadline = run_time() + timeout_s
        while not (waits := self._stopped or (self._waits and self._newest > self._chosen)):
            if run_time() > deadline:
                break
            time.sleep(POLL_S)
        return waits

    def redo(self) -> bool:
        """Another thread has done the update after the chosen state itself, and the host holds what that has left: from
        now on this is the chosen state. False if the device has begun to do the same."""
        self._redone = self.is_whole()
        return self._redone

    def is_whole(self) -> bool:
        """Whether the device has not begun to change the chosen state: all that has been read until now is of it.
        Raises DeviceSilent."""
        return self._chosen == self._newest or not self._queue.ask(self._slot(self._chosen + 1).begin.query)

    def _look(self) -> tuple[int, bool]:
        """The newest update that the device has begun, -1 if none, and whether it has ended. Anything after it is only
        queued."""
        begun = (n for n in self._numbers(self._newest) if self._slot(n).begun and self._slot(n).begin.query())
        number = next(begun, -1)
        return number, number >= 0 and self._slot(number).ended and self._slot(number).end.query()

    def _numbers(self, newest: int) -> range:
        return range(newest, max(newest - SLOTS, -1), -1)

    def _slot(self, number: int) -> _Slot[Held]:
        return self._slots[number % SLOTS]

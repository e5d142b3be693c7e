"""DeviceThread: asks the device in a thread of its own, so that a call that does not return blocks nothing else.

A CUDA stream takes about 1,024 kernels in advance. Once it is full, the next launch waits in C until the device goes
on, and the driver may hold its lock meanwhile: then every other call to it waits, too, from any thread, even one that
only asks about an event (pytorch issues 110449 and 130844). If the device hangs in a collective that waits for a dead
rank, such a call never returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

# How long the device may take for one answer. What legitimately keeps the driver's lock takes less: a kernel that is
# loaded, memory that is pinned. And after a SIGTERM there may be no more than twelve seconds left.
ANSWER_S = 5.0
START_S = 60.0
ROUND_S = 0.1  # silence is counted in rounds of this length, so not while the process is suspended

T = TypeVar("T")


class DeviceSilent(Exception):
    """The device does not answer. The message says so of a rank's device, in words for the log and the record."""


class _Call(Generic[T]):
    """One call, and its outcome."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.done = threading.Event()
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self.done.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._result)


class DeviceThread:
    """A thread that has entered `beside` for good, see `DeviceQueue`. That needs the device, so make it while the
    device is sure to answer. Raises what entering raises, and DeviceSilent."""

    def __init__(self, beside: Callable[[], AbstractContextManager[None]]) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._stuck: _Call[Any] | None = None  # the call that did not return in time
        self._entered = ExitStack()
        self._thread = threading.Thread(target=self._serve, name="beside", daemon=True)
        self._thread.start()
        self.ask(lambda: self._entered.enter_context(beside()), START_S)

    def ask(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Do this in the thread, one caller after another, and return what it returns. Raises what it raises, and
        DeviceSilent if it takes longer than `timeout_s` (by default ANSWER_S), or at once while an earlier call has not
        returned. Work that was given up may still be done later."""
        if threading.current_thread() is self._thread:
            return work()
        with self._turn:
            if self._stuck is not None and not self._stuck.done.is_set():
                raise self._silence()
            call, self._stuck = _Call(work), None
            self._calls.put(call)
            for _ in range(round((ANSWER_S if timeout_s is None else timeout_s) / ROUND_S)):
                if call.done.wait(ROUND_S):
                    return call.result()
            self._stuck = call
            raise self._silence()

    def close(self) -> None:
        """End the thread, unless it is stuck."""
        self._calls.put(None)

    def _silence(self) -> DeviceSilent:
        return DeviceSilent(
            f"its device does not answer: its driver has not returned from a call for {ANSWER_S:.0f} s, as happens "
            "while another thread waits to launch a kernel into a full queue"
        )

    def _serve(self) -> None:
        with self._entered:
            while (call := self._calls.get()) is not None:
                call.run()
                del call  # what it refers to must not live until the next one

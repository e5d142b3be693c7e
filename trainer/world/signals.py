"""Signals that ask for a stop. The handler itself does nothing: a thread reads the signal's number from a pipe.

Python runs a handler between two bytecodes of the main thread, which may be deep in a collective or a compiler for
minutes, and whatever a handler does may find that thread holding a lock. The C half of Python's signal handling,
though, writes each number to a wake-up file descriptor at once (signal.set_wakeup_fd), and a thread can wait on that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# USR2 is submitit's "requeue me", USR1 some sites' word for it; TERM is Slurm's word on preemption, requeue and cancel.
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOPS = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Signals:
    """Catches the signals that ask for a stop, until `release`: a second SIGTERM, late or from an impatient user, must
    not cut short what the process still has to write."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at: float | None = None  # time.monotonic()
        self.requeue: Callable[[], None] | None = None  # submitit's handler, where submitit started this process
        self._before: dict[signal.Signals, Any] = {}
        self._lock = threading.Lock()
        self._listener: Callable[[signal.Signals], None] | None = None

    @classmethod
    def catch(cls) -> Signals:
        """Begin to catch. Call in the main thread, as early as can be."""
        signals = cls()
        signals._before = {number: signal.getsignal(number) for number in STOPS}
        requeue = signals._before[signal.SIGUSR2]
        if callable(requeue):
            signals.requeue = lambda: requeue(signal.SIGUSR2, None)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=signals._read, args=(reader,), name="signals", daemon=True).start()
        for number in STOPS:
            signal.signal(number, _do_nothing)
        # The local launcher starts its ranks with these blocked, so that none comes before it can be caught.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        return signals

    def release(self, process_ends: bool) -> None:
        """The attempt is over. A process that now ends ignores late signals: on its way out Python would reset its
        handlers, so that a SIGTERM turned a finished rank into a failed one; any other gets back what it had."""
        for number, before in self._before.items():
            # None stands for a handler that was not set from Python and cannot be put back from it.
            signal.signal(number, signal.SIG_IGN if process_ends else before or signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def tell(self, listener: Callable[[signal.Signals], None]) -> None:
        """Call `listener` with the first stop signal, in another thread; at once when it has come already."""
        with self._lock:
            self._listener = listener
            if self.first is not None:
                listener(self.first)

    def _read(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number in STOPS:
                    self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
        with self._lock:
            if self.first is None:
                self.first, self.first_at = number, time.monotonic()
                if self._listener is not None:
                    self._listener(number)


def set_up_worker(_: Any = None) -> None:
    """For a loader's worker process: a stop is the rank's business, which ends its workers itself. One that outlived a
    killed rank would hold its connections open, and its peers would not hear of its death."""
    signal.set_wakeup_fd(-1)
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def die_with_parent(number: signal.Signals) -> None:
    """Send this process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python must have a handler for its C half to write to the wake-up descriptor."""

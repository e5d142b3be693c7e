"""Catching the signals that ask for a stop. The handler does nothing; a thread reads the signal's number from a pipe.

Python runs a handler between two bytecodes of the main thread. That thread may be inside a collective or a compiler for
minutes, and it may hold a lock that the handler would need. But the C half of Python's signal handling writes each
number to a wake-up file descriptor at once (signal.set_wakeup_fd), and a thread can wait on that descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# submitit asks for a requeue with USR2, some sites with USR1. Slurm sends TERM on preemption, requeue and cancel.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
SIGNALLED = "LASTSTEP_SIGNALLED"  # set by a batch shell that has received a signal
SIGSET_BYTES = 128  # of a sigset_t; glibc's and musl's have this size
END = 0  # is no signal: it ends the thread
CLOSE_S = 1.0


class Signals:
    """Catches the signals that ask for a stop, until `release`.

    It catches the later ones too: a second SIGTERM, late or from an impatient user, must not kill the process while it
    is still writing.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at: float | None = None  # time.monotonic()
        self.received: list[tuple[signal.Signals, float]] = []  # all of them, with the time.monotonic() of each
        self.requeue: Callable[[], None] | None = None  # submitit's handler, where submitit started this process
        self._before: dict[signal.Signals, Any] = {}
        self._others = -1  # the wake-up descriptor that this process had before, as asyncio has in a notebook
        self._reader, self._writer = -1, -1
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._lock = threading.Lock()
        self._listener: Callable[[signal.Signals], None] | None = None

    @classmethod
    def catch(cls) -> Signals:
        """Start catching. Call this in the main thread, as early as possible."""
        signals = cls()
        signals._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        requeue = signals._before[signal.SIGUSR2]
        if callable(requeue):
            signals.requeue = lambda: requeue(signal.SIGUSR2, None)
        signals._reader, signals._writer = os.pipe()
        os.set_blocking(signals._writer, False)
        signals._others = signal.set_wakeup_fd(signals._writer, warn_on_full_buffer=False)
        signals._thread.start()
        for number in STOP_SIGNALS:
            signal.signal(number, _do_nothing)
        # The local launcher starts its ranks with these signals blocked, so that none arrives before it can be caught.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return signals

    def release(self, process_ends: bool) -> None:
        """Stop catching, at the end of the attempt.

        A process that is about to end ignores late signals: Python resets its handlers on exit, and a SIGTERM would
        then turn a finished rank into a failed one. Any other process gets back the handlers that it had before.
        """
        for number, before in self._before.items():
            # None: the handler was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_IGN if process_ends else before or signal.SIG_DFL)
        try:
            signal.set_wakeup_fd(self._others)
        except (OSError, ValueError):  # it has been closed meanwhile
            signal.set_wakeup_fd(-1)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([END]))  # closing it would not do: a child that was forked may hold it open
        os.close(self._writer)
        self._thread.join(CLOSE_S)  # it may be waiting for a store that no longer answers

    def on_first(self, listener: Callable[[signal.Signals], None]) -> None:
        """Call `listener` with the first stop signal, in another thread; at once if that signal has already arrived."""
        with self._lock:
            self._listener = listener
            if self.first is not None:
                listener(self.first)

    def _read(self) -> None:
        while (number := os.read(self._reader, 1)) and number[0] != END:
            if number[0] in STOP_SIGNALS:
                self._record(signal.Signals(number[0]))
            elif self._others != -1:  # a signal that the rest of this program waits for
                with contextlib.suppress(OSError):  # the descriptor is full, or closed
                    os.write(self._others, number)
        os.close(self._reader)

    def _record(self, number: signal.Signals) -> None:
        with self._lock:
            self.received.append((number, time.monotonic()))
            if self.first is None:
                self.first, self.first_at = self.received[0]
                if self._listener is not None:
                    self._listener(number)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Meanwhile this thread, and a process that it forks, receives no stop signal: another thread does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_up_worker(_: Any = None) -> None:
    """Set up a loader's worker process: ignore stop signals, and die with the rank, which ends its workers itself.

    A worker that outlived a killed rank would keep its connections open, and its peers would not notice the death.
    """
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    die_with_parent(signal.SIGKILL)


def next_signal(numbers: Iterable[int], wait_s: float) -> int | None:
    """The next of these signals, which are blocked, that arrives within `wait_s`; None if none does.

    Not signal.sigtimedwait: if the process is stopped and continued meanwhile, as Slurm suspends a job, CPython (3.11)
    returns what happens to be on its stack as the signal.
    """
    libc = ctypes.CDLL(None)
    mask = ctypes.create_string_buffer(SIGSET_BYTES)
    libc.sigemptyset(mask)
    for number in numbers:
        libc.sigaddset(mask, int(number))
    found: int = libc.sigtimedwait(mask, None, (ctypes.c_long * 2)(int(wait_s), int(wait_s % 1 * 1e9)))
    return None if found < 0 else found


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler must be installed, or Python's C half does not write to the wake-up descriptor."""

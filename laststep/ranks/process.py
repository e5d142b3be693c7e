"""This process and others of its machine: starting them, the time in which they run, the signals they get, who lives.

`run_time` counts the time in which this process could run, for deadlines: Slurm suspends jobs (`scontrol suspend`,
PreemptMode=SUSPEND, gang scheduling), and machines freeze, while the clocks move on. `Alarm` rings by that time.

`Signals` catches those that ask for a stop. Python runs a handler between two bytecodes of the main thread, which may
be inside a collective for minutes, or hold a lock that the handler needs. So the handler does nothing. But the C half
of Python's signal handling writes each number to a file descriptor at once (signal.set_wakeup_fd), and a thread reads
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SUPERVISED = "--supervised"  # the word of `python -m laststep` that makes a supervisor of --local
# A node at its limit of processes, or short of memory, has others that end: wait so long for them.
START_S = 5.0
PAUSE_S = 0.25


def started(start: Callable[[], T], wait_s: float | None = None) -> T:
    """What `start` returns, which starts a process or a thread. Tried again while the kernel has none to give, for
    `wait_s`, by default START_S. Raises what `start` raises."""
    deadline = time.monotonic() + (START_S if wait_s is None else wait_s)
    while True:
        try:
            return start()
        except (OSError, RuntimeError) as error:
            may_pass = not isinstance(error, OSError) or error.errno in (errno.EAGAIN, errno.ENOMEM)
            if not may_pass or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)


def start_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Do this work in a daemon thread, started as `started` does. Raises RuntimeError."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    started(thread.start)
    return thread


def stat_of(pid: int | str) -> list[str]:
    """The fields of a process's `stat` (proc(5)), from its state on; none if it has gone, or without /proc."""
    with suppress(OSError):  # the name before them, in parentheses, may contain anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def identity(pid: int | None = None) -> str:
    """What names a process for as long as the machine runs: its id, which may be used again, and when it started. Empty
    if it has ended, or if this system does not say (it has no /proc). The default is this process."""
    pid = os.getpid() if pid is None else pid
    stat = stat_of(pid)
    return f"{pid} {stat[19]}" if stat and stat[0] not in "ZX" else ""


def is_running(process: str) -> bool:
    """Whether the process with this `identity` runs on this node."""
    return bool(process) and identity(int(process.split()[0])) == process


def here() -> str:
    """What names this process among those of all machines; empty where the system has no /proc."""
    mine = identity()
    return f"{machine()} {mine}" if mine else ""


def machine() -> str:
    """What names the process ids that this process sees: this container since the machine's last start. Two containers
    may have the same host name."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def is_here(process: str) -> bool:
    """Whether this process sees the process that called `here`, if that still runs."""
    return bool(process) and process.split()[0] == machine()


def lives_here(process: str) -> bool:
    """Whether the process that called `here` runs, as far as this process can see."""
    return is_here(process) and is_running(process.partition(" ")[2])


def _processes() -> dict[int, list[str]]:
    """The `stat_of` each process."""
    return {int(folder.name): stat for folder in Path("/proc").glob("[0-9]*") if (stat := stat_of(folder.name))}


def _words(pid: int) -> list[str]:
    """The command line of a process; none of a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _descendants(parent: int, processes: Mapping[int, Sequence[str]]) -> list[int]:
    found = [parent]
    for pid in found:  # grows meanwhile
        found += [child for child, stat in processes.items() if stat[1] == str(pid)]
    return found[1:]


def kill_children(program: str) -> None:
    """Kill the children of this process that run a program of this name, and all that they have started."""
    processes = _processes()
    for child in children_of(os.getpid()):
        if program in map(os.path.basename, _words(child)[:3]):
            for pid in [child, *_descendants(child, processes)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def children_of(parent: int, word: str = "") -> list[int]:
    """The living children of a process; with a word, those that have it in their command line."""
    own = [pid for pid, stat in _processes().items() if stat[1] == str(parent) and stat[0] not in "ZX"]
    return [pid for pid in own if word in _words(pid)] if word else own


beside: set[int] = set()  # children of this process that are no part of its work, see laststep.ranks.beside


def cpu_s_of_descendants(ancestor: int) -> float:
    """CPU seconds that the living descendants of a process have used, and the children that these have waited for; not
    what runs `beside` it."""
    processes = {pid: stat for pid, stat in _processes().items() if pid not in beside}
    ticks = (int(count) for pid in _descendants(ancestor, processes) for count in processes[pid][11:15])
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def keep_orphans() -> None:
    """Have the kernel make this process the parent of what its descendants leave behind (Linux): `end_descendants`
    then finds all of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill all that this process has started, and what that has, and wait for its end, for KILL_S at most."""
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # with `keep_orphans`, a process without children has no descendants
            return
        for pid in _descendants(os.getpid(), _processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S / 10)


def session(leader: int) -> list[int]:
    """The processes of a session other than its leader; none where the system does not say."""
    return [pid for pid, stat in _processes().items() if stat[3] == str(leader) and pid != leader]


TICK_S = 0.25
# What a pause between two ticks counts at most. Threads of a starved process tick late; that costs it nothing either.
LONGEST_S = 1.0
MOST_PAUSES = 1000  # that are remembered


class _Clock:
    """Counts, in a thread, the pauses between its ticks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted_s, self._ticked_at = 0.0, time.monotonic()
        # When each longer pause ended, and what of it was not counted.
        self._missed: deque[tuple[float, float]] = deque(maxlen=MOST_PAUSES)
        threading.Thread(target=self._tick, name="clock", daemon=True).start()

    def read(self) -> float:
        with self._lock:
            now = time.monotonic()
            pause_s = now - self._ticked_at
            self._counted_s += min(pause_s, LONGEST_S)
            self._ticked_at = now
            if pause_s > LONGEST_S:
                self._missed.append((now, pause_s - LONGEST_S))
            return self._counted_s

    def missed_s(self, since: float) -> float:
        self.read()
        with self._lock:
            return sum(seconds for ended_at, seconds in self._missed if ended_at > since)

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.read()


_clocks: list[_Clock] = []
os.register_at_fork(after_in_child=_clocks.clear)  # a child does not have the thread


def run_time() -> float:
    """Seconds in which this process could run, since some moment; a forked child has its own."""
    return _clock().read()


def paused_s(since: float) -> float:
    """Seconds since this time.monotonic() in which this process could not run, as `run_time` counts: it was suspended,
    its machine was frozen, or one of its threads held the interpreter's lock in C. Known from the first call of either
    function on."""
    return _clock().missed_s(since)


def _clock() -> _Clock:
    if not _clocks:
        _clocks.append(_Clock())
    return _clocks[0]


ROUND_S = 0.5


class Alarm:
    """Calls `ring`, in a thread of its own, after `seconds` in which this process could run, unless it is cancelled or
    the block that it opens has ended."""

    def __init__(self, seconds: float, ring: Callable[[], object]) -> None:
        self._rings_at, self._ring = run_time() + seconds, ring
        self._cancelled = threading.Event()
        start_thread("alarm", self._wait)

    def cancel(self) -> None:
        """What was waited for has come."""
        self._cancelled.set()

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def _wait(self) -> None:
        while (left_s := self._rings_at - run_time()) > 0:
            if self._cancelled.wait(min(left_s, ROUND_S)):
                return
        if not self._cancelled.is_set():
            self._ring()


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
KILL_S = 5.0  # a process that waits for a disk in the kernel dies later
# submitit asks for a requeue with USR2, some sites with USR1. Slurm sends TERM on preemption, requeue and cancel.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
SIGNALLED = "LASTSTEP_SIGNALLED"  # set by a batch shell that has received a signal
SIGSET_BYTES = 128  # of a sigset_t; glibc's and musl's have this size
END = 0  # is no signal: it ends the thread
CLOSE_S = 1.0


class Signals:
    """Catches the signals that ask for a stop, until `release`. A second SIGTERM, late or from an impatient user, must
    not kill the process while it is still writing."""

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
        """Stop catching, at the end of the attempt. The process gets back the handlers that it had before; one that is
        about to end ignores late signals, as a SIGTERM would turn a finished rank into a failed one."""
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
    """Set up a loader's worker process: ignore stop signals, and die with the rank. One that outlived it would keep its
    connections open, and its peers would not notice the death."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    die_with_parent(signal.SIGKILL)


def next_signal(numbers: Iterable[int], wait_s: float) -> int | None:
    """The next of these signals, which are blocked, that arrives within `wait_s`; None if none does. Not
    signal.sigtimedwait: if the process is stopped and continued meanwhile, as Slurm suspends a job, CPython (3.11)
    returns what happens to be on its stack as the signal."""
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

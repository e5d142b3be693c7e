"""Processes of this machine: starting one, or a thread, and looking at others: whether one still runs takes no message
from it, however starved it is."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SUPERVISED = "--supervised"  # the word of `python -m laststep` that makes a supervisor of --local
# A node at its limit of processes, or short of memory, has others that end: wait so long for them.
START_S = 5.0
PAUSE_S = 0.25


def started(start: Callable[[], T], wait_s: float | None = None) -> T:
    """What `start` returns, which starts a process. Tried again while the kernel has none to give, for `wait_s`, by
    default START_S.

    Raises what `start` raises.
    """
    deadline = time.monotonic() + (START_S if wait_s is None else wait_s)
    while True:
        try:
            return start()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM) or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Tried again while the kernel has none to give, for START_S; then raises RuntimeError."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return thread.start()
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)


def identity(pid: int | None = None) -> str:
    """What names a process for as long as the machine runs: its id, which may be used again, and when it started.

    Empty if it has ended, or if this system does not say (it has no /proc). The default is this process.
    """
    pid = os.getpid() if pid is None else pid
    try:
        # proc(5): the name, in parentheses, may contain anything; after it come the state, and as the 20th the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]}"


def is_running(process: str) -> bool:
    """Whether the process with this `identity` runs on this node."""
    return bool(process) and identity(int(process.split()[0])) == process


def here() -> str:
    """What names this process among those of all machines; empty where the system has no /proc."""
    mine = identity()
    return f"{machine()} {mine}" if mine else ""


def machine() -> str:
    """What names the numbers of processes that this process sees: those of this container, since the machine's last
    start. Two containers may have the same host name."""
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


def kill_children(program: str) -> None:
    """Kill the children of this process that run a program of this name, and all that they have started."""
    parents, programs = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().split(b"\0")
            programs[int(folder.name)] = [os.path.basename(word.decode(errors="replace")) for word in words[:3]]
    doomed = [pid for pid, parent in parents.items() if parent == os.getpid() and program in programs.get(pid, ())]
    for pid in doomed:  # grows meanwhile
        doomed += [child for child, parent in parents.items() if parent == pid]
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(parent: int, word: str) -> list[int]:
    """The living children of a process that have this word in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            its_parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if its_parent == parent and word.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))  # a zombie has no command line
    return found


def cpu_s_of_descendants(ancestor: int) -> float:
    """CPU seconds that the living descendants of a process have used, and the children that these have waited for."""
    tick_s, parents, used = 1 / os.sysconf("SC_CLK_TCK"), {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            used[int(folder.name)] = sum(map(int, fields[11:15])) * tick_s
    found = {ancestor}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return sum(used[pid] for pid in found - {ancestor})


def session(leader: int) -> list[int]:
    """The processes of a session other than its leader; none where the system does not say (no /proc)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == leader != int(folder.name):
                found.append(int(folder.name))
    return found

"""The processes of this machine, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path


def processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """The pid, command line and environment of every process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(folder.name), command, dict(word.split("=", 1) for word in environ if "=" in word)


def parent(pid: int) -> int:
    """The pid of the parent of process `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cut_power(pids: Iterable[int]) -> bool:
    """End these processes as if the power went off for all of them at once. Returns whether any was still running.

    They are frozen first, or srun's child would have the ranks on other nodes killed; parents before their children, as
    a shell that waits hears of its child's stop. Children are killed before their parents: the end of a parent wakes
    children that are frozen in process groups of their own (POSIX.1, _Exit(): an orphaned process group gets SIGHUP and
    SIGCONT), and srun would use that moment in the same way.
    """
    parents: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            parents[pid] = parent(pid)

    def depth(pid: int) -> int:
        return 1 + depth(parents[pid]) if pid in parents else 0

    found = sorted(parents, key=depth, reverse=True)
    for number, order in ((signal.SIGSTOP, reversed(found)), (signal.SIGKILL, found)):
        for pid in order:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    return bool(found)

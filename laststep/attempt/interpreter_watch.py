"""InterpreterWatch: ends this process if none of its Python threads runs any more, because user code never releases the
interpreter's lock.

No thread of the process can do that. A small process beside it does, which Python starts from this file alone. It gets
a sign twice a second, and counts its own rounds without one: Slurm suspends it with its rank, and the clock would move
on. Nor does it count while its rank alone is stopped. faulthandler.dump_traceback_later measures by a clock.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time

ROUND_S = 0.5
CLOSE_S = 5.0
DIES_S = 10.0  # how long a process may take to print its stacks and to die
TIMED, UNTIMED = b"t", b"u"  # the signs: whether another one must follow


class InterpreterWatch:
    """Ends this process when `sign(True)` is not followed by another sign within `timeout_s`. Raises OSError."""

    def __init__(self, timeout_s: float) -> None:
        words = [sys.executable, "-IS", __file__, str(os.getpid()), str(timeout_s)]
        reader, self._signs = os.pipe()
        os.set_blocking(self._signs, False)
        try:
            self._process = os.posix_spawn(
                sys.executable,
                words,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
                # They ask for a stop, and often go to all processes of a job; this one stays until its rank ends.
                setsigmask=[signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT],
            )
        finally:
            os.close(reader)

    def sign(self, timed: bool) -> None:
        """A Python thread runs. `timed`: another sign must follow in time."""
        with contextlib.suppress(OSError):  # the process has ended, or been closed
            os.write(self._signs, TIMED if timed else UNTIMED)

    def close(self) -> None:
        """Watch no more."""
        signs, self._signs = self._signs, -1
        os.close(signs)
        with contextlib.suppress(ChildProcessError):  # this program lets the system reap its children
            until = time.monotonic() + CLOSE_S
            while not os.waitpid(self._process, os.WNOHANG)[0]:
                if time.monotonic() > until:  # it is stopped
                    os.kill(self._process, signal.SIGKILL)
                time.sleep(0.005)


def watch(process: int, timeout_s: float) -> None:
    """What the process beside does: read the signs of its parent `process` until that ends, or end it."""
    os.closerange(3, 1 << 16)  # whatever the rank had open
    silent_s, timed = 0.0, False
    while os.getppid() == process:
        if select.select([0], [], [], ROUND_S)[0]:
            if not (signs := os.read(0, 4096)):
                return
            silent_s, timed = 0.0, signs[-1:] == TIMED
        elif timed and not _is_stopped(process):
            silent_s += ROUND_S
            if silent_s > timeout_s:
                return _end(process, silent_s)


def _is_stopped(process: int) -> bool:
    """Whether it cannot run, by SIGSTOP or by a debugger."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _end(process: int, silent_s: float) -> None:
    print(
        f"laststep: no Python thread of process {process} has run for {silent_s:.0f} s: its code holds the "
        "interpreter's lock. Ending it; its stacks:",
        file=sys.stderr,
        flush=True,
    )
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(process, resource.RLIMIT_CORE, (0, 0))  # the stacks are enough
    for number in (signal.SIGABRT, signal.SIGKILL):  # on the first one faulthandler prints the stacks, in C
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
        until = time.monotonic() + DIES_S
        while os.getppid() == process and time.monotonic() < until:
            time.sleep(ROUND_S / 10)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))

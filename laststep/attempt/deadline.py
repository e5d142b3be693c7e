"""Deadlines for the end of an attempt: a library or a disk that hangs there must not hold the nodes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import NoReturn

from laststep.ranks.alarm import Alarm
from laststep.ranks.process import start_thread
from laststep.say import flush_output, say


def run_for(timeout_s: float, work: Callable[[], None]) -> bool:
    """Call `work` in a thread, and stop waiting for it after `timeout_s`. Whether it ended."""
    thread = threading.Thread(target=work, daemon=True)
    start_thread(thread)
    thread.join(timeout_s)
    return not thread.is_alive()


def exit_now(status: int = 1) -> NoReturn:
    """End this process although its main thread cannot."""
    flush_output()
    os._exit(status)


def print_stacks() -> None:
    """Print the stacks of all threads on stderr, which need not be a file: in a notebook it has no descriptor."""
    with contextlib.suppress(Exception):  # of a stream that somebody has closed or replaced: the end must not fail here
        try:
            faulthandler.dump_traceback(file=sys.stderr)
        except (AttributeError, OSError, ValueError):
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file=file)
                file.seek(0)
                sys.stderr.write(file.read())


class Deadline:
    """Ends the process with `status`, unless `cancel` is called within `timeout_s`."""

    def __init__(self, timeout_s: float, status: int) -> None:
        self.status = status
        self._timeout_s = timeout_s
        self._alarm = Alarm(timeout_s, self._expire)

    def cancel(self) -> None:
        """The process has got to where it can end by itself."""
        self._alarm.cancel()

    def _expire(self) -> None:
        say(f"the end of this rank takes longer than {self._timeout_s:.0f} s; exiting with status {self.status}")
        print_stacks()
        exit_now(self.status)


class LastExit:
    """Ends the process right before Python would destroy its objects, among them one that hangs.

    Everything else is done by then: the launcher has written the result, and the user's own handlers have run, as this
    is made before them.
    """

    def __init__(self) -> None:
        self.needed = False
        self.status = 0
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self.needed:  # an exception may have come after `status` was set
            exit_now(1 if getattr(sys, "last_value", None) is not None else self.status)

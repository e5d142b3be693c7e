"""status --watch: keep a view on the terminal up to date, and scroll it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rich.console import Console
from rich.control import Control
from rich.text import Text

from laststep.cli.status_tables import View
from laststep.observe.progress import duration

READ_EVERY_S = 2.0
DRAW_EVERY_S = 1.0  # for the clock, and for a terminal that changes its size
STALE_S = 10.0  # mark a reading that is older than this
HINT = "arrows scroll, q ends"
KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
QUIT = (b"q", b"Q")
# Keys that scroll, and which way: by a line, by a page, or to an end.
BY_LINE = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1}
BY_PAGE = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1}
TO_END = {b"\x1b[H": -1, b"\x1bOH": -1, b"\x1b[1~": -1, b"g": -1, b"\x1b[F": 1, b"\x1bOF": 1, b"\x1b[4~": 1, b"G": 1}
T = TypeVar("T")


def watch(read: Callable[[], T], draw: Callable[[T, int], View]) -> None:
    """Redraw the terminal until q or Ctrl-C; then leave the last view there. Raises what `read` raises."""
    readings = _Readings(read)
    console = Console()
    window = _Window()
    drawn: tuple[T, int] | None = None
    try:
        with _keys() as pressed, console.screen() as screen:
            while True:
                if drawn is None or drawn[0] is not readings.newest() or drawn[1] != console.width:
                    drawn = readings.newest(), console.width
                    view = draw(*drawn)
                window.show(view, console.height, readings.age_s())
                console.control(Control.home())
                screen.update(Text("\n", no_wrap=True, overflow="crop").join([*window.lines, window.footer(HINT)]))
                for key in pressed(DRAW_EVERY_S):
                    if key in QUIT:
                        return
                    window.scroll(key)
    finally:
        if window.lines:
            console.print(Text("\n").join([*window.lines, *filter(None, [window.footer()])]), soft_wrap=True)


class _Window:
    """The part of a view that the terminal has room for: a clock and the totals, the header, and some of the rows."""

    def __init__(self) -> None:
        self.lines: list[Text] = []
        self._top = self._room = self._rows = self._more = 0

    def show(self, view: View, height: int, age_s: float) -> None:
        """Show the part of the view that `scroll` has led to."""
        clock = Text(time.strftime("%H:%M:%S"), "bold")
        if view.totals:
            clock.append("  ").append_text(view.totals)
        if age_s > STALE_S:
            clock.append(f"  as of {duration(age_s)} ago", "yellow")
        top = [clock, Text(), *view.header]
        self._rows, self._more, self._room = len(view.rows), view.more, max(1, height - len(top) - 1)
        self._to(self._top)
        self.lines = [*top, *view.rows[self._top : self._top + self._room]]

    def footer(self, hint: str = "") -> Text:
        """How many rows are above and below, and the hint."""
        below = max(0, self._rows - self._top - self._room) + self._more
        parts = [f"... {self._top:,} above"] if self._top else []
        parts += [f"... {below:,} more"] if below else []
        return Text("   ".join(filter(None, (*parts, hint))), "dim", no_wrap=True)

    def scroll(self, key: bytes) -> None:
        """Move by what a key asks for; other keys do nothing."""
        self._to(self._top + BY_LINE.get(key, 0) + self._room * BY_PAGE.get(key, 0) + self._rows * TO_END.get(key, 0))

    def _to(self, top: int) -> None:
        self._top = max(0, min(top, self._rows - self._room))


class _Readings(Generic[T]):
    """Reads again and again in a thread of its own, so that keys are answered while Slurm or a disk is slow."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read, self._newest, self._at = read, read(), time.monotonic()
        self._error: Exception | None = None
        threading.Thread(target=self._keep_reading, daemon=True).start()

    def newest(self) -> T:
        """The newest reading. Raises what `read` has raised since."""
        if self._error:
            raise self._error
        return self._newest

    def age_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._at

    def _keep_reading(self) -> None:
        try:
            while True:
                time.sleep(READ_EVERY_S)
                self._newest = self._read()
                self._at = time.monotonic()
        except Exception as error:
            self._error = error


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[bytes]]]:
    """A function that returns the keys pressed on the terminal, or none after this many seconds."""
    if not sys.stdin.isatty():  # only Ctrl-C ends it

        def wait(seconds: float) -> list[bytes]:
            time.sleep(seconds)
            return []

        yield wait
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> list[bytes]:
        if not select.select([terminal], [], [], seconds)[0]:
            return []
        return KEY.findall(os.read(terminal, 1024)) or [QUIT[0]]  # nothing to read: the terminal is gone

    try:
        tty.setcbreak(terminal)  # each key at once and unseen; Ctrl-C remains a signal
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)

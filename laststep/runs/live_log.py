"""Rank 0's growing log on the screen: under --local and --follow.

A terminal gets a progress bar below the log, and at most a few progress lines a second: a fast run writes hundreds. A
pipe or a file gets every line and no bar.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from laststep.records.metrics import newest_step
from laststep.records.plan import read_plan
from laststep.rundir import RunDir

BAR_EVERY_S = 0.5  # between two updates of the bar
PROGRESS_EVERY_S = 0.25  # between two progress lines on a terminal
OUR_MARK = b"[laststep "
PROGRESS = re.compile(rb"\[laststep [\d:]+\] step \d+/\d+ ")
# What a progress line leaves out on a narrow terminal, in this order. The bar below it shows most of it.
GIVES_WAY = (b" left", b" samples/s", b"grad norm ", b"epoch ", b"lr ")


class LiveLog:
    """Prints what rank 0 of a run writes to its log, and shows how far the run is."""

    def __init__(self, run: RunDir, log: Path) -> None:
        self._run, self._log = run, log
        self._offset = 0  # bytes of the log that were read
        self._bar_updated_at = 0.0
        self._bar = None
        self._filter: ProgressFilter | None = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._filter = ProgressFilter(lambda: shutil.get_terminal_size().columns)

    def __enter__(self) -> LiveLog:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._filter:
            _print(self._filter.rest())
        if self._bar:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def update(self) -> None:
        """Print the new lines of the log, `error: ...` lines to stderr, and move the bar. What the disk does not show
        right now comes with a later update."""
        with contextlib.suppress(OSError):
            self._update()

    def _update(self) -> None:
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            self._offset += len(data)
            _print(self._filter.pass_on(data, time.monotonic()) if self._filter else data.splitlines(keepends=True))
        if self._bar and time.monotonic() > self._bar_updated_at + BAR_EVERY_S:
            self._bar_updated_at = time.monotonic()
            plan = read_plan(self._run.plan)
            step = newest_step(self._run.metrics)
            if step:
                loss = ""
                if "loss" in step:
                    loss = "loss not finite  " if step["loss"] is None else f"loss {step['loss']:.4f}  "
                text = f"epoch {step['epoch']}  {loss}{step['samples_per_s']:,.0f} samples/s"
                total = plan["total_steps"] if plan else None
                self._bar.update(self._task, completed=step["step"], total=total, description=text)


class ProgressFilter:
    """Drops progress lines ("step N/M ...") that follow each other too fast, and nothing else.

    The newest progress line is held back until it is due. It is printed sooner when any other line follows, so that
    the lines stay in order, and at the end, so that the last one is always seen. A line that is wider than the
    terminal's `columns` is shortened.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._partial = b""  # the beginning of a line of ours, which may become a progress line
        self._held = b""  # the newest progress line, if it was not printed
        self._printed_at = -PROGRESS_EVERY_S

    def pass_on(self, data: bytes, now: float) -> Iterator[bytes]:
        """The lines to print, given what the log has gained since the last call; `now` is in seconds."""
        lines = (self._partial + data).splitlines(keepends=True)
        self._partial = b""
        if lines and lines[-1].startswith(OUR_MARK) and not lines[-1].endswith(b"\n"):
            self._partial = lines.pop()
        for line in lines:
            if PROGRESS.match(line):
                self._held = line
                continue
            yield from self._release(now)
            yield line
        if now >= self._printed_at + PROGRESS_EVERY_S:
            yield from self._release(now)

    def rest(self) -> list[bytes]:
        """What is still held back, at the end of the run."""
        rest = [*self._release(now=0.0), *([self._partial] if self._partial else [])]
        self._partial = b""
        return rest

    def _release(self, now: float) -> Iterator[bytes]:
        if self._held:
            line, self._held, self._printed_at = self._held, b"", now
            yield fitted(line, self._columns())


def fitted(line: bytes, columns: int) -> bytes:
    """A progress line without the fields that have no room in a terminal of this width."""
    fields = line.rstrip(b"\n").split(b"  ")
    for unit in GIVES_WAY:
        if len(b"  ".join(fields)) <= columns:
            break
        fields = [field for field in fields if unit not in field]
    return b"  ".join(fields) + b"\n"


def _print(lines: Iterable[bytes]) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone; the log file is not
        for line in lines:
            stream = sys.stderr if line.startswith(b"error: ") else sys.stdout
            stream.write(line.decode(errors="replace"))
            stream.flush()

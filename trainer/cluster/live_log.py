"""A growing log on the screen: with a bar under it on a terminal, as plain lines anywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType

from trainer.records.metrics import newest_step
from trainer.records.plan import read_plan
from trainer.rundir import RunDir

BAR_S = 0.5  # between two looks at how far the run is


class Screen:
    """Shows rank 0's log of a run, and how far the run is."""

    def __init__(self, run: RunDir, log: Path) -> None:
        self._run, self._log = run, log
        self._shown = 0  # bytes of the log
        self._looked_at = 0.0
        self._bar = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, transient=True)
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Screen:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def update(self) -> None:
        """Print what is new in the log, its `error: ...` lines to stderr, and move the bar."""
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._shown)
                data = file.read()
            self._shown += len(data)
            with contextlib.suppress(OSError):  # the terminal may be gone; the log is not
                for line in data.splitlines(keepends=True):
                    stream = sys.stderr if line.startswith(b"error: ") else sys.stdout
                    stream.write(line.decode(errors="replace"))
                    stream.flush()
        if self._bar and time.monotonic() > self._looked_at + BAR_S:
            self._looked_at = time.monotonic()
            plan = read_plan(self._run.plan)
            step = newest_step(self._run.metrics)
            if step:
                loss = ""
                if "loss" in step:
                    loss = "loss not finite  " if step["loss"] is None else f"loss {step['loss']:.4f}  "
                said = f"epoch {step['epoch']}  {loss}{step['samples_per_s']:,.0f} samples/s"
                total = plan["total_steps"] if plan else None
                self._bar.update(self._task, completed=step["step"], total=total, description=said)

"""metrics.jsonl: each step and each epoch of a run exactly once, however the run was interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeGuard

TAIL = 4096  # bytes at the end of a file that hold its newest lines


class _Step(TypedDict):
    step: int
    time: float  # Unix seconds


class StepLine(_Step, total=False):
    """The line of a step. A custom loop may log more, or less. An epoch's line has `epoch`, `step` and what was
    measured, under the names that the task gives it."""

    epoch: int
    loss: float | None  # None when it is not finite
    samples_per_s: float


class MetricsFile:
    """Appends records. A resumed run first rewinds the file to as many records as its checkpoint remembers.

    Steps done after that checkpoint are lost and done again, so their lines are cut off. Only rank 0 writes. Every
    other rank keeps in memory what it would have written since the newest checkpoint, so that it can replace rank 0
    (`rewrite_tail`).
    """

    def __init__(self, path: Path, writes: bool) -> None:
        self.path = path
        self.count = 0  # records so far, from the start of the run
        self._writes = writes
        self._checkpointed = 0  # records that the newest checkpoint includes
        self._lines_since: list[bytes] = []  # the lines after these
        self._unwritten = 0  # how many of `_lines_since`, counted from its end, are not in the file
        self._lock = threading.Lock()  # a save calls `sync` from its own thread

    def rewind(self, count: int) -> None:
        """Cut off every line after the first `count`, half-written ones too. Raises OSError."""
        if self._writes:
            _cut(self.path, count)
        self.count = self._checkpointed = count
        self._lines_since, self._unwritten = [], 0

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line per record. Lines that a full disk refuses stay in memory; the next call tries them again."""
        lines = [json.dumps(record).encode() + b"\n" for record in records]
        with self._lock:
            self._lines_since += lines
            self._unwritten += len(lines)
            self.count += len(lines)
            if self._writes:
                with contextlib.suppress(OSError):
                    self._write()

    def sync(self) -> None:
        """Make every line survive a power cut. Call before a checkpoint is committed. Raises OSError."""
        with self._lock:
            self._write()
        _fsync(self.path)

    def mark_checkpointed(self, count: int) -> None:
        """A checkpoint that includes the first `count` records is committed: they need not stay in memory."""
        with self._lock:
            self._lines_since = self._lines_since[count - self._checkpointed :]
            self._checkpointed = count

    def rewrite_tail(self) -> None:
        """Write all lines since the newest checkpoint, in place of rank 0, which may have died before it had written
        them, or within one. Raises OSError."""
        with self._lock:
            _cut(self.path, self._checkpointed)
            self._unwritten = len(self._lines_since)
            self._write()
        _fsync(self.path)

    def _write(self) -> None:
        append(self.path, b"".join(self._lines_since[len(self._lines_since) - self._unwritten :]))
        self._unwritten = 0


def append(path: Path, data: bytes) -> None:
    """Append to a file all or nothing: half a record would spoil the next one. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            written = 0
            while written < len(data):  # when the disk becomes full, it takes a part and refuses the next call
                written += file.write(data[written:])
        except OSError:
            file.truncate(start)
            raise


def is_step(line: Mapping[str, Any]) -> TypeGuard[StepLine]:
    """Whether a line is that of a step, not of an epoch."""
    return "time" in line


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file. A line that a crash cut short is skipped; a file that does not exist has none."""
    records = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def damaged_lines(path: Path) -> int:
    """How many lines `read_lines` skips: 1 after a crash, more if the file is damaged otherwise."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return len(lines) - len(read_lines(path))


def last_lines(path: Path, size: int = TAIL, without: bytes | None = None) -> list[dict[str, Any]]:
    """The records in the last `size` bytes of a .jsonl file. A long file is read as quickly as a short one.

    Lines that contain `without` are skipped, which is quicker than parsing them.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        if without and without in line:
            continue
        with contextlib.suppress(ValueError):  # the first may be cut, the last half-written
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def newest_step(path: Path) -> StepLine | None:
    """The line of the last step in metrics.jsonl, None before the first."""
    return next((line for line in reversed(last_lines(path)) if is_step(line)), None)


def newest_epoch(path: Path, key: str = "epoch") -> dict[str, Any] | None:
    """The line of the last epoch in metrics.jsonl that has this key, None before the first.

    Reads the file from its end, as far back as needed.
    """
    size = TAIL
    while True:
        for line in reversed(last_lines(path, size, without=b'"time":')):
            if key in line and not is_step(line):
                return line
        if not path.exists() or size >= path.stat().st_size:
            return None
        size *= 8


def metrics_in(line: Mapping[str, Any]) -> list[str]:
    """The names of the metrics in an epoch's line."""
    return [name for name in line if name not in ("epoch", "step")]


def first_step_since(path: Path, moment: float) -> StepLine | None:
    """The line of the first step done since `moment` (Unix seconds), None when there is none yet.

    Reads the file from its end, as far back as needed.
    """
    size = TAIL
    while True:
        steps = [line for line in last_lines(path, size) if is_step(line)]
        if (steps and steps[0]["time"] < moment) or not path.exists() or size >= path.stat().st_size:
            return next((line for line in steps if line["time"] >= moment), None)
        size *= 8


def _cut(path: Path, count: int) -> None:
    """Truncate a file after `count` lines."""
    with path.open("ab+") as file:
        file.seek(0)
        end = sum(len(line) for line, _ in zip(file, range(count)))
        file.truncate(end)


def _fsync(path: Path) -> None:
    with path.open("ab") as file:
        os.fsync(file.fileno())

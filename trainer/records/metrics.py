"""metrics.jsonl: each step and each epoch of a run exactly once, whatever happened between."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends records; a resumed run first rewinds to as many as its checkpoint remembers.

    Steps done after that checkpoint and lost are done again, so their lines go. Rank 0 writes. Every other rank keeps
    in memory what it would have written since the newest checkpoint, to be able to stand in (`take_over`).
    """

    def __init__(self, path: Path, writes: bool) -> None:
        self.path = path
        self.count = 0  # records so far, from the start of the run
        self._writes = writes
        self._settled = 0  # so many of them belong to a checkpoint
        self._recent: list[bytes] = []  # the lines since
        self._unwritten = 0  # so many of these, the last, are not in the file
        self._lock = threading.Lock()  # `sync` is called beside the training

    def rewind(self, count: int) -> None:
        """Forget every line after the first `count`, half-written ones too. Raises OSError."""
        if self._writes:
            _cut(self.path, count)
        self.count = self._settled = count
        self._recent, self._unwritten = [], 0

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line per record. What a full disk refuses is kept, and tried again with what comes next."""
        lines = [json.dumps(record).encode() + b"\n" for record in records]
        with self._lock:
            self._recent += lines
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

    def settle(self, count: int) -> None:
        """The first `count` records belong to a checkpoint by now."""
        with self._lock:
            self._recent = self._recent[count - self._settled :]
            self._settled = count

    def take_over(self) -> None:
        """Rank 0 may be dead: leave the file as it would have, after its last sign of life. Raises OSError."""
        with self._lock:
            _cut(self.path, self._settled)
            self._unwritten = len(self._recent)
            self._write()
        _fsync(self.path)

    def _write(self) -> None:
        append(self.path, b"".join(self._recent[len(self._recent) - self._unwritten :]))
        self._unwritten = 0


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file all or nothing: half a record would spoil the one that follows it. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            written = 0
            while written < len(data):  # a full disk takes a part, and refuses the next call
                written += file.write(data[written:])
        except OSError:
            file.truncate(start)
            raise


def is_step(line: Mapping[str, Any]) -> bool:
    """Whether a line is that of a step, and not of an epoch."""
    return "time" in line


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a line cut short by a crash is passed over."""
    records = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def damaged_lines(path: Path) -> int:
    """How many lines `read_lines` passes over: 1 after a crash, more after worse."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return len(lines) - len(read_lines(path))


def last_lines(path: Path, size: int = 4096) -> list[dict[str, Any]]:
    """The records in the last `size` bytes of a .jsonl file, however long it is."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the first is cut, the last may be half written
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def _cut(path: Path, count: int) -> None:
    """Truncate a file after `count` lines."""
    with path.open("ab+") as file:
        file.seek(0)
        end = sum(len(line) for line, _ in zip(file, range(count)))
        file.truncate(end)


def _fsync(path: Path) -> None:
    with path.open("ab") as file:
        os.fsync(file.fileno())

"""metrics.jsonl: each step and each epoch of a run exactly once, whatever happened between."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends records; a resumed run first rewinds to the place that its checkpoint remembers.

    Steps done after that checkpoint and lost are done again, so their lines go. One process writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten = b""

    def rewind(self, offset: int) -> None:
        """Forget every line after `offset` bytes, half-written ones too."""
        with self.path.open("ab") as file:
            if file.tell() > offset:
                file.truncate(offset)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line per record. What a full disk refuses is kept, and tried again with what comes next."""
        self._unwritten += b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with contextlib.suppress(OSError):
            self._write()

    def sync(self) -> int:
        """Make every line survive a power cut; returns the offset to rewind to. Call before committing a checkpoint.

        Raises OSError when the disk refuses.
        """
        self._write()
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def _write(self) -> None:
        """All or nothing: half a line would spoil the one that follows it."""
        with self.path.open("ab", buffering=0) as file:
            start = file.tell()
            try:
                if file.write(self._unwritten) < len(self._unwritten):
                    raise OSError(errno.ENOSPC, "only a part was written", str(self.path))
            except OSError:
                file.truncate(start)
                raise
        self._unwritten = b""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a line cut short by a crash is passed over."""
    records = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]

"""The processes of this machine, read from /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

"""What this process's loop does right now, for other programs on its node: a word in a page of shared memory.

Showing it is a copy of some bytes into memory, which waits for nothing. Only the first rank of a node shows it. Without
such memory nothing is shown, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

BYTES = 64
SHARED_MEMORY = "/dev/shm"


class Signpost:
    """Shows what this process does; nothing until `open`."""

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None
        self._path: Path | None = None
        self.shown = ""

    def open(self, run: Path) -> Callable[[], None]:
        """Show it from now on to those who `read` the run; returns what ends that."""
        path = _path(run)
        with contextlib.suppress(OSError, ValueError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # of an attempt before
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, BYTES)
                self._page = mmap.mmap(file, BYTES)
                self._path = path
            finally:
                os.close(file)
            self.show(self.shown)
        return self.close

    def show(self, what: str) -> None:
        """This is what the process does from now on."""
        self.shown = what
        if self._page is not None:
            self._page[:] = what.encode()[:BYTES].ljust(BYTES, b"\0")

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """This is what the process does meanwhile."""
        before = self.shown
        self.show(what)
        try:
            yield
        finally:
            self.show(before)

    def close(self) -> None:
        """Show nothing any more."""
        page, path, self._page, self._path = self._page, self._path, None, None
        if page is not None and path is not None:
            page.close()
            with contextlib.suppress(OSError):
                path.unlink()


signpost = Signpost()


def read(run: Path) -> str:
    """What the first rank of the run on this node does; empty where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        file = os.open(_path(run), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_uid == os.geteuid():
                return os.read(file, BYTES).rstrip(b"\0").decode(errors="replace")
        finally:
            os.close(file)
    return ""


def _path(run: Path) -> Path:
    """Where it stands: the same on a node for all processes of a run."""
    folder = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir()
    return Path(folder) / f"laststep-{os.geteuid()}-{hashlib.sha256(str(run).encode()).hexdigest()[:16]}"

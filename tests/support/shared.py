"""What several processes of one test session share: a folder, and locks."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "LASTSTEP_TESTS_SHARED"  # pytest-xdist's workers inherit it from the process that starts them


def make_shared_folder() -> None:
    """Make the folder of this session."""
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="laststep-tests-")
    (shared_folder() / "owner").write_text(str(os.getpid()))


def remove_shared_folder() -> None:
    """Remove the folder of this session."""
    shutil.rmtree(os.environ[VARIABLE], ignore_errors=True)


def shared_folder() -> Path:
    """The folder of this session."""
    return Path(os.environ[VARIABLE])


def owner() -> int:
    """The pid of the process that the whole session lasts as long as."""
    return int((shared_folder() / "owner").read_text())


@contextmanager
def shared_lock(name: str) -> Iterator[None]:
    """Hold the lock with this name: one process of the session at a time. A process that dies releases it."""
    with (shared_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

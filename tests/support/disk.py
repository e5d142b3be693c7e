"""A disk whose calls fail from a chosen one on, or meet another process's work at a chosen one."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laststep.ranks import disk

# Every call by which a commit or a deletion touches the disk; Path and shutil go through these too.
DISK_CALLS = [
    *((os, name) for name in ("mkdir", "rename", "replace", "rmdir", "unlink", "link", "fsync", "open")),
    (io, "open"),
]


@contextmanager
def failing_at(call: int, error: BaseException) -> Iterator[list[str]]:
    """From the disk call with this number on, each one fails; yields the names of the calls so far."""

    def fail(number: int) -> None:
        if number >= call:
            raise error

    with _before_each(fail) as calls:
        yield calls


@contextmanager
def acting_at(call: int, action: Callable[[], None]) -> Iterator[list[str]]:
    """Do `action` right before the disk call with this number; yields the names of the calls so far."""

    def act(number: int) -> None:
        if number == call:
            action()

    with _before_each(act) as calls:
        yield calls


@contextmanager
def refusing(path: Path, number: int, times: int = 1 << 30, call: str | None = None) -> Iterator[list[str]]:
    """The first calls of this kind, or of any, that name this path or are about its open file fail with this error
    number; yields the names of these calls."""
    refused: list[str] = []

    def refuse(name: str, target: Any) -> None:
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        if call in (None, name) and len(refused) < times and target is not None and os.fspath(target) == str(path):
            refused.append(name)
            raise OSError(number, os.strerror(number), str(path))

    calls = [*DISK_CALLS, *((os, name) for name in ("listdir", "scandir", "stat", "lstat", "readlink", "preadv"))]
    with _wrapped(calls, refuse):
        yield refused


@contextmanager
def _before_each(hook: Callable[[int], None]) -> Iterator[list[str]]:
    calls: list[str] = []

    def note(name: str, target: Any) -> None:
        calls.append(name)
        hook(len(calls) - 1)

    with _wrapped(DISK_CALLS, note):
        yield calls


@contextmanager
def _wrapped(functions: Sequence[tuple[Any, str]], hook: Callable[[str, Any], None]) -> Iterator[None]:
    """Call `hook` with the name and the first argument of each call of these functions, before it is done."""
    before = [(module, name, getattr(module, name)) for module, name in functions]

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*words: Any, **named: Any) -> Any:
            hook(name, words[0] if words else None)
            return real(*words, **named)

        return wrapped

    for module, name, real in before:
        setattr(module, name, wrap(name, real))
    try:
        yield
    finally:
        for module, name, real in before:
            setattr(module, name, real)


def flock_fails(number: int, times: int = 1 << 30) -> list[int]:
    """From now on the first `times` calls of flock in this process fail with this error number; returns a list that
    these calls grow."""
    failed: list[int] = []
    real = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        if len(failed) < times:
            failed.append(operation)
            raise OSError(number, os.strerror(number))
        real(file, operation)

    fcntl.flock = flock
    return failed


def without_locks() -> None:
    """Have this process, a rank, find a file system without locks, such as Lustre without `-o flock`."""
    flock_fails(errno.ENOSYS)


def eager() -> None:
    """Have this process, a rank that begins, look all the time whether the run's lock is free."""
    disk.LOCK_POLL_S = 0.001

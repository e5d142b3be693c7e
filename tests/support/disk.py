"""A disk whose calls fail from a chosen one on, or meet another process's work at a chosen one."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Every call by which a commit or a deletion touches the disk; Path and shutil go through these too.
DISK_CALLS = [
    *((os, name) for name in ("mkdir", "rename", "replace", "rmdir", "unlink", "fsync", "open")),
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
def _before_each(hook: Callable[[int], None]) -> Iterator[list[str]]:
    calls: list[str] = []
    before = [(module, name, getattr(module, name)) for module, name in DISK_CALLS]

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*words: Any, **named: Any) -> Any:
            calls.append(name)
            hook(len(calls) - 1)
            return real(*words, **named)

        return wrapped

    for module, name, real in before:
        setattr(module, name, wrap(name, real))
    try:
        yield calls
    finally:
        for module, name, real in before:
            setattr(module, name, real)

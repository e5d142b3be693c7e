"""Calling a function if something takes too long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def alarm(seconds: float, ring: Callable[[], object]) -> Iterator[None]:
    """Call `ring`, in a thread of its own, if the block takes longer than this."""
    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

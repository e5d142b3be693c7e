"""What all tests share."""

from __future__ import annotations

import multiprocessing
import os
import signal

# Two cores and many ranks: more threads than cores would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell starts what it sends to the background with Ctrl-C ignored, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """End what a test that failed has left: Python would wait at its exit for loader workers, which ignore SIGTERM."""
    for child in multiprocessing.active_children():
        child.kill()

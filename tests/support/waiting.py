"""How long tests wait for something before they fail, and waiting for it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Generous: a busy machine must not fail a test, and a test that passes never waits this long.
DEADLINE_S = 180.0


def wait_until(condition: Callable[[], T], failure: str, poll_s: float = 0.02) -> T:
    """Poll until `condition` returns something true and return that; fail the test with `failure` at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{failure} (waited {DEADLINE_S:.0f} s)"
        time.sleep(poll_s)
    return value


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what the process prints up to the line with `text`; kill it and fail the test if that does not appear."""
    said, late = "", threading.Timer(DEADLINE_S, process.kill)
    late.start()
    for line in process.stdout or ():
        said += line
        if text in line:
            late.cancel()
            return said
    late.cancel()
    raise AssertionError(f"{text!r} was not printed within {DEADLINE_S:.0f} s:\n{said}")

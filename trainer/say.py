"""What a rank says of itself, into its log."""

from __future__ import annotations

import contextlib
import sys
import time


def say(text: str) -> None:
    """Print a line, marked as ours and with the time, by which `launch.py logs` puts the ranks' lines in order.

    The log may be on a disk that is full by now: no reason to end the training.
    """
    with contextlib.suppress(OSError):
        # In one piece, unlike print: threads talk too, and a line of theirs must not get into the middle of this one.
        sys.stdout.write(f"[laststep {time.strftime('%H:%M:%S')}] {text.strip()}\n")
        sys.stdout.flush()


def fall_silent() -> None:
    """Before the process ends itself: what was printed shall reach the log, if it can."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()

"""Printing into a rank's log."""

from __future__ import annotations

import contextlib
import sys
import time


def say(text: str) -> None:
    """Print one line with our mark and the time; `launch.py logs` puts the lines of all ranks in order by it.

    A failed write, for example to a full disk, is ignored: it is no reason to end the training.
    """
    with contextlib.suppress(OSError):
        # A single write, unlike print's two: else a line from another thread could end up in the middle of this one.
        sys.stdout.write(f"[laststep {time.strftime('%H:%M:%S')}] {text.strip()}\n")
        sys.stdout.flush()


def flush_output() -> None:
    """Flush stdout and stderr, before the process ends without Python's own cleanup."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()

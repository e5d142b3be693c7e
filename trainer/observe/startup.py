"""How long an attempt took to come to its first step, and with what."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartupTimer:
    """A stopwatch that began with the process."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float]] = []
        self._since = self._began = time.monotonic() - _age_s()
        self.done("python")

    def done(self, phase: str) -> None:
        """What was done since the last call was this."""
        now = time.monotonic()
        self._parts.append((phase, now - self._since))
        self._since = now

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._parts)
        return f"{self._since - self._began:.2f} s: {parts}"


def _age_s() -> float:
    """Seconds since this process was started; 0 where the system does not tell (man 5 proc)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")

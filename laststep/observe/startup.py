"""How long an attempt took to reach its first step, and how long each phase of its start took."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartupTimer:
    """A stopwatch that started with the process."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, float]] = []  # name, seconds
        self._phase_began = self._began = time.monotonic() - _process_age_s()
        self.done("python")

    def done(self, phase: str) -> None:
        """End a phase: it lasted from the previous call until now."""
        now = time.monotonic()
        self._phases.append((phase, now - self._phase_began))
        self._phase_began = now

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._phases)
        return f"{self._phase_began - self._began:.2f} s: {phases}"


def _process_age_s() -> float:
    """Seconds since this process was started; 0 on a system without /proc (man 5 proc)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")

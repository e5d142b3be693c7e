"""The lines that rank 0 prints during training: plain text, for a terminal and for a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from laststep.observe.hints import slow_data
from laststep.say import say

# After this many seconds of steps, print a hint if more than this share of them was spent waiting for data.
WINDOW_S = 60.0
SLOW_SHARE = 0.3
TERMINAL_S = 0.25  # between two lines of steps on a terminal


class Progress:
    """Measures the speed of training, and prints progress lines on rank 0. The other ranks only measure."""

    def __init__(self, prints: bool) -> None:
        self.prints = prints
        self.total_steps = 0
        # Since the clock was last restarted.
        self._steps, self._samples = 0, 0
        self._since = self._last_step_at = time.perf_counter()
        # Of this attempt, before that.
        self._earlier_steps, self._earlier_s = 0, 0.0
        # Of the window for the hint about slow data.
        self._window_s = self._data_wait_s = 0.0
        self._hint_given = False
        # Of the lines of steps.
        self._on_terminal = sys.stdout.isatty()
        self._next_line_at = 0.0

    def restart_clock(self) -> None:
        """Start a new measurement, e.g. after a validation or a save. The time since the last step is not counted."""
        self._earlier_steps += self._steps
        self._earlier_s += self._last_step_at - self._since
        self._steps, self._samples = 0, 0
        self._since = self._last_step_at = time.perf_counter()

    def count(self, samples: int) -> None:
        """Count a finished step and its samples, those of all ranks."""
        now = time.perf_counter()
        self._window_s += now - self._last_step_at
        self._samples += samples
        self._steps += 1
        self._last_step_at = now

    def add_data_wait(self, seconds: float) -> None:
        """Count the time that the current step has spent waiting for its data."""
        self._data_wait_s += seconds

    def since_restart(self) -> tuple[int, float]:
        """Steps finished since the clock was last restarted, and the seconds since then."""
        return self._steps, time.perf_counter() - self._since

    def step_s(self) -> float:
        """Mean seconds per step of this attempt, without validations and saves."""
        seconds = self._earlier_s + self._last_step_at - self._since
        return max(1e-9, seconds) / max(1, self._earlier_steps + self._steps)

    def throughput(self) -> float:
        """Samples per second over all ranks, since the clock was last restarted."""
        return self._samples / max(time.perf_counter() - self._since, 1e-9)

    def print_step(self, line: Mapping[str, Any]) -> None:
        """Print a step's line of metrics.jsonl, in which a loss that is not finite is None. On a terminal, at most a
        few a second: nobody reads more."""
        if not self.prints or time.perf_counter() < self._next_line_at:
            return
        if self._on_terminal:
            self._next_line_at = time.perf_counter() + TERMINAL_S
        seconds = time.perf_counter() - self._since
        left_s = (self.total_steps - line["step"]) * seconds / max(1, self._steps)
        parts = [f"step {line['step']}/{self.total_steps}", f"epoch {line['epoch']}"]
        if "loss" in line:
            parts.append("loss not finite" if line["loss"] is None else f"loss {line['loss']:.4f}")
        if "lr" in line:
            parts.append(f"lr {line['lr']:.4g}")
        if line.get("grad_norm") is not None:
            parts.append(f"grad norm {line['grad_norm']:.4g}")
        if "tokens_per_s" in line:
            counted = f"{line['tokens_per_s']:,.0f} tokens/s" + (f"  mfu {line['mfu']:.1%}" if "mfu" in line else "")
        else:
            counted = f"{self.throughput():,.0f} samples/s" if self._samples or not self._steps else ""
        rate = counted or f"{self._steps / max(seconds, 1e-9):,.3g} steps/s"
        self.say("  ".join([*parts, rate, f"{duration(left_s)} left"]))
        if self._window_s > WINDOW_S:
            self._check_data_wait()

    def print_epoch(self, line: Mapping[str, Any]) -> None:
        """Print an epoch's line of metrics.jsonl."""
        self.say(_text(line))

    def print_result(self, metrics: Mapping[str, Any]) -> None:
        """Print the final metrics of the run."""
        self.say(f"finished: {_text(metrics)}")

    def say(self, text: str) -> None:
        """Print a line with Laststep's mark and the time, on rank 0 only."""
        if self.prints:
            say(text)

    def _check_data_wait(self) -> None:
        """End the window. Print the hint, once per attempt, if steps waited too long for data."""
        share = self._data_wait_s / self._window_s
        if share > SLOW_SHARE and not self._hint_given:
            self._hint_given = True
            self.say(slow_data(share))
        self._window_s = self._data_wait_s = 0.0


def _text(metrics: Mapping[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())


def duration(seconds: float) -> str:
    """An elapsed time, such as 35s, 12m 30s, 1h 02m or 3d 04h."""
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if round(seconds) >= size:
            return f"{round(seconds) // size}{unit} {round(seconds) % size // smaller_size:02}{smaller}"
    return f"{round(seconds)}s"

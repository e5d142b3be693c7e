"""What rank 0 prints while it trains: plain lines, fit for a terminal and for a log file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.observe.hints import slow_data
from trainer.say import say

# After so many seconds of steps it is time to ask what share of them went into waiting for data, and whether that is
# worth a line.
WINDOW_S = 60.0
SLOW_SHARE = 0.3


class Progress:
    """A line now and then; silent on every rank but 0."""

    def __init__(self, prints: bool) -> None:
        self.prints = prints
        self.total_steps = 0
        self._steps, self._steps_s = 0, 0.0  # of this attempt, until the clock was last restarted
        self._samples, self._counted = 0, 0
        self._since = self._last = time.perf_counter()
        self._window_s = self._waited_s = 0.0  # of steps, and of waiting for their data
        self._advised = False

    def restart_clock(self) -> None:
        """Leave out of the throughput what came before: a validation, a save."""
        self._steps += self._counted
        self._steps_s += self._last - self._since
        self._samples, self._counted = 0, 0
        self._since = self._last = time.perf_counter()

    def count(self, samples: int) -> None:
        """A step is done, on so many samples."""
        now = time.perf_counter()
        self._window_s += now - self._last
        self._samples += samples
        self._counted += 1
        self._last = now

    def waited(self, seconds: float) -> None:
        """The step that is under way has waited so long for its data."""
        self._waited_s += seconds

    def stretch(self) -> tuple[int, float]:
        """Steps done since the clock was last restarted, and the seconds since."""
        return self._counted, time.perf_counter() - self._since

    def step_s(self) -> float:
        """Mean seconds that a step of this attempt took, validations and saves left out."""
        return max(1e-9, self._steps_s + self._last - self._since) / max(1, self._steps + self._counted)

    def throughput(self) -> float:
        """Samples per second over all ranks, since the clock was last restarted."""
        return self._samples / max(time.perf_counter() - self._since, 1e-9)

    def step(self, record: Mapping[str, Any]) -> None:
        """Print how far the run is, given a step's line of metrics.jsonl; its loss is None when it was not finite."""
        seconds = time.perf_counter() - self._since
        left = (self.total_steps - record["step"]) * seconds / max(1, self._counted)
        parts = [f"step {record['step']}/{self.total_steps}", f"epoch {record['epoch']}"]
        if "loss" in record:
            parts.append("loss not finite" if record["loss"] is None else f"loss {record['loss']:.4f}")
        if "lr" in record:
            parts.append(f"lr {record['lr']:.4g}")
        self.say("  ".join([*parts, f"{self.throughput():,.0f} samples/s", f"{duration(left)} left"]))
        if self._window_s > WINDOW_S:
            self._judge_loading()

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """Print an epoch's line of metrics.jsonl."""
        self.say(_named(metrics))

    def finished(self, metrics: Mapping[str, Any]) -> None:
        """Print the result of the run."""
        self.say(f"finished: {_named(metrics)}")

    def _judge_loading(self) -> None:
        """Say, once, that the steps of this window have spent too much of their time waiting for data."""
        share = self._waited_s / self._window_s
        if share > SLOW_SHARE and not self._advised:
            self._advised = True
            self.say(slow_data(share))
        self._window_s = self._waited_s = 0.0

    def say(self, text: str) -> None:
        """Print one line, marked as Laststep's and with the time."""
        if self.prints:
            say(text)


def _named(metrics: Mapping[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

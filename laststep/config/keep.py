"""Which checkpoints a run keeps: the best ones (checkpoint.best_by), and some for good (checkpoint.anchors)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from laststep.config.errors import ConfigError


@dataclass(frozen=True)
class Ranking:
    """A metric of the validation, and whether a lower value of it is better."""

    metric: str
    lower_is_better: bool

    @classmethod
    def parse(cls, text: str) -> Ranking:
        """From `val_loss`, `NAME:min` or `NAME:max`. Raises ConfigError: a wrong guess would keep the worst."""
        metric, colon, which = text.partition(":")
        if not colon and "loss" in metric:
            which = "min"
        if not metric or which not in ("min", "max"):
            raise ConfigError(
                f"checkpoint.best_by={text}: say which values are better, as in {metric or 'val_accuracy'}:max or "
                f"{metric or 'val_loss'}:min"
            )
        return cls(metric, which == "min")

    def badness(self, metrics: Mapping[str, float | None]) -> float:
        """A number that is lower for better metrics; NaN where the metric is missing or not finite."""
        value = metrics.get(self.metric)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return math.nan
        return value if self.lower_is_better else -value

    def __str__(self) -> str:
        return f"{'lowest' if self.lower_is_better else 'highest'} {self.metric}"


UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Anchors:
    """One checkpoint every `every` steps, or as many as fit into `most_bytes`; neither: none."""

    every: int | None = None
    most_bytes: int | None = None

    @classmethod
    def parse(cls, value: int | str | None) -> Anchors:
        """What the key says. Raises ConfigError."""
        if value is None or isinstance(value, int):
            return cls(every=value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT]B)", value.strip(), re.IGNORECASE)
        if not found or not float(found[1]):
            raise ConfigError(
                f"checkpoint.anchors={value}: must be a number of steps, or a size in MB, GB or TB, such as 200GB"
            )
        return cls(most_bytes=int(float(found[1]) * UNITS[found[2].upper()]))

    def kept(self, sizes: Mapping[int, int], newest: int) -> set[int]:
        """Those of the checkpoints of these steps and sizes in bytes to keep, where the run is at step `newest`.

        Of those that do not fit, the one goes whose absence leaves the shortest gap for its age: what is left is dense
        near the end of the run and the sparser the older.
        """
        if self.every is not None:
            return {step for step in sizes if step % self.every == 0}
        if self.most_bytes is None:
            return set()
        steps, total = sorted(sizes), sum(sizes.values())
        while steps and total > self.most_bytes:
            around = [0, *steps, newest]
            gaps = [(around[at + 2] - around[at]) / max(1, newest - around[at]) for at in range(len(steps))]
            gone = steps.pop(gaps.index(min(gaps)))
            total -= sizes[gone]
        return set(steps)


NO_ANCHORS = Anchors()

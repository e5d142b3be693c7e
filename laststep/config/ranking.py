"""Which checkpoints are best: checkpoint.best_by."""

from __future__ import annotations

import math
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

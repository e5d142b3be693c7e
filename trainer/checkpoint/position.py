"""Position: how far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Position:
    """How far a run has come. Steps and samples count over all epochs, from the start of the run."""

    step: int = 0
    samples: int = 0  # consumed by finished steps, never merely prefetched
    validated: int = 0  # the step after which the latest epoch ended, and with it its validation
    loss_sum: float = 0.0  # over the samples of the epoch so far
    loss_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the latest epoch's line of metrics.jsonl
    records: int = 0  # lines of metrics.jsonl that belong to this position
    skipped: int = 0  # steps left out because the loss or the gradient was not finite
    epoch: int = 0  # epochs that have ended
    # Of a loop of one's own:
    batches: int = 0  # of the epoch under way, so many steps are done
    over: bool = False  # no more follow, and what comes after them in the epoch is not done
    finished: bool = False  # the loop has returned, with `metrics`

    def end_epoch(self, record: dict[str, Any]) -> None:
        """An epoch ends after the last finished step; `record` is its line of metrics.jsonl."""
        self.metrics, self.validated = record, self.step
        self.loss_sum, self.loss_samples = 0.0, 0
        self.epoch, self.batches, self.over = self.epoch + 1, 0, False

    def same_place(self, other: Position) -> bool:
        """Whether a checkpoint of one is as good as one of the other."""
        places = [(p.step, p.validated, p.over, p.finished) for p in (self, other)]
        return places[0] == places[1]

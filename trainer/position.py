"""Position: how far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Position:
    """How far a run has come. Steps and samples count over all epochs, from the start of the run."""

    step: int = 0
    samples: int = 0  # consumed by finished steps, never merely prefetched
    validated: int = 0  # the step after which the latest finished validation ran
    loss_sum: float = 0.0  # over the samples of the epoch so far
    loss_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the latest epoch's line of metrics.jsonl
    records: int = 0  # lines of metrics.jsonl that belong to this position
    skipped: int = 0  # steps left out because the loss or the gradient was not finite

    def same_place(self, other: Position) -> bool:
        """Whether a checkpoint of one is as good as one of the other."""
        return (self.step, self.validated) == (other.step, other.validated)

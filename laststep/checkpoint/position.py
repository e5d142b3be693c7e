"""Position: how far a run has come. Every checkpoint contains one, so its fields must keep their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Position:
    """How far a run has come. Steps and samples are counted from the start of the run, over all epochs."""

    step: int = 0
    samples: int = 0  # consumed by finished steps; prefetched ones do not count
    validated: int = 0  # the last step of the newest epoch that has ended, validation included
    loss_sum: float = 0.0  # over the samples of the current epoch so far
    loss_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the line of the newest ended epoch in metrics.jsonl
    records: int = 0  # lines of metrics.jsonl that belong to this position
    skipped: int = 0  # steps without an update because the loss or a gradient was not finite
    epoch: int = 0  # epochs that have ended
    # Of the newest ended epoch. A run that ended within an epoch and is extended continues that epoch.
    cut_loss_sum: float = 0.0
    cut_loss_samples: int = 0
    # Of a custom training loop:
    batches: int = 0  # steps done in the current epoch
    over: bool = False  # all steps of the current epoch are done, the code that follows them in the epoch is not
    measured: int = 0  # the step of the newest validation within an epoch
    finished: bool = False  # the loop has returned; `metrics` is its result
    modes: str = ""  # of its modules in the last step, see laststep.loops.loop_rules

    def end_epoch(self, record: dict[str, Any]) -> None:
        """End the current epoch after the last finished step. `record` is its line of metrics.jsonl."""
        self.metrics, self.validated = record, self.step
        self.cut_loss_sum, self.cut_loss_samples = self.loss_sum, self.loss_samples
        self.loss_sum, self.loss_samples = 0.0, 0
        self.epoch, self.batches, self.over = self.epoch + 1, 0, False

    def reopen_epoch(self, begins_after: int) -> None:
        """Undo `end_epoch`. `begins_after` is the last step before the epoch."""
        self.validated, self.epoch, self.records = begins_after, self.epoch - 1, self.records - 1
        self.loss_sum, self.loss_samples = self.cut_loss_sum, self.cut_loss_samples

    @property
    def place(self) -> tuple[int, int, bool, bool]:
        """What distinguishes it from any other position of the run; a later one is larger."""
        return self.step, self.validated, self.over, self.finished

    def same_place(self, other: Position) -> bool:
        """Whether a checkpoint of `other` makes one of this position unnecessary."""
        return self.place == other.place

"""The same training under Laststep: its classification task, which also records each step."""

from __future__ import annotations

from torch import nn

from benchmarks.peers import workload
from laststep.ranks.launchers import detect_world
from laststep.tasks.classification import Classification


class Recorded(Classification):
    """Image classification that records each step."""

    def model(self) -> nn.Module:
        """The same model, from the same seed."""
        model = workload.build()
        workload.record_steps(model, detect_world().rank)
        return model

"""The same training under Laststep: its ready-made task, with the record."""

from __future__ import annotations

from torch import nn

from benchmarks.peers import workload
from trainer.tasks.classification import Classification
from trainer.world.launchers import detect_world


class Recorded(Classification):
    """Image classification that leaves a record of each step."""

    def model(self) -> nn.Module:
        """The same model, from the same seed."""
        model = workload.build()
        workload.record_steps(model, detect_world().rank)
        return model

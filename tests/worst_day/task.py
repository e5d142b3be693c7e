"""What the run trains: a few cheap steps, with one death and one stop, and a note of what really happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from laststep.config.config import Config
from laststep.ranks.launchers import detect_world
from laststep.tasks.classification import Classification

ASIDE = "LASTSTEP_WORST_DAY_ASIDE"  # a folder on a disk that never fails
DEATH, STOP = 4, 4  # the step of its attempt in which the last rank dies once, and rank 0 is stopped once after that


class Victim(Classification):
    """Notes each step that this rank begins."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.world = world = detect_world()
        self.aside = Path(os.environ[ASIDE])
        self.steps = -1  # the first call is the warm-up's
        self.after_death = (self.aside / "death").exists()
        self.note = (self.aside / f"{world.attempt}.{world.rank}").open("a", buffering=1)
        own = (world.job_id, world.restart, world.step_id, world.step_restarts or 0)
        self.note.write(f"{json.dumps(own)}\n")

    def model(self) -> nn.Module:
        count = self.channels * self.image_size**2
        frozen = nn.Linear(count, count).requires_grad_(False)  # stands in files of its own, linked from save to save
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), frozen, nn.Linear(count, 3))

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if model.training:
            self.steps += 1
            if self.steps:
                self.note.write(".")
                self.note.flush()
            if self.steps == DEATH and self.world.rank == self.world.size - 1 and self._first("death"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.steps == STOP and self.world.rank == 0 and self.after_death and self._first("stop"):
                os.kill(os.getpid(), signal.SIGTERM)
        return super().step(model, batch)

    def _first(self, event: str) -> bool:
        """Whether this happens for the first time in the run."""
        try:
            (self.aside / event).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

"""Tasks that tests train to see how ranks get their data, and how fast."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from laststep.config.config import Config
from laststep.observe import progress
from laststep.ranks import watchdog
from laststep.ranks.launchers import detect_world
from laststep.tasks.classification import Classification


class Slow(Classification):
    """Rank 1 is slow: LASTSTEP_TEST_SLOW is the pause in each of its steps and the watchdog's interval, in seconds."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pause_s, watchdog.SLOW_WINDOW_S = map(float, os.environ["LASTSTEP_TEST_SLOW"].split())

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if detect_world().rank == 1:
            time.sleep(self.pause_s)
        return super().step(model, batch)


class Unhurried(Classification):
    """Each sample takes 20 ms to load, without CPU time."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        training, validation = super().datasets()
        return Delayed(training), validation


class SlowData(Unhurried):
    """The rank measures often what slow loading costs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        progress.WINDOW_S = 0.2


class Delayed(Dataset[Any]):
    """A data set on a slow disk."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return self.dataset[index]


class Prepared(Classification):
    """Writes to the file LASTSTEP_TEST_NOTES which ranks prepare the data and which open it, in order of time."""

    def note(self, what: str) -> None:
        with open(os.environ["LASTSTEP_TEST_NOTES"], "a") as notes:
            notes.write(f"{what} {detect_world().rank}\n")

    def prepare(self) -> None:
        self.note("begins")
        time.sleep(0.2)  # longer than any rank takes to get here, so that a rank which did not wait would show
        self.note("ends")

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        self.note("opens")
        return super().datasets()


class Linear(Classification):
    """Without batch norm and dropout, so that it makes no difference how ranks share a batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(self.channels * self.image_size**2, self.classes or 0))

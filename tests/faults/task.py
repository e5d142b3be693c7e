"""What the runs under faults train: full of randomness, at a pace that the harness sets, with a trace of the batches
done, from which the harness counts lost steps by itself.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from laststep.config.config import Config
from laststep.ranks.launchers import detect_world
from laststep.task import Task

# The folder of a run's pace, trace and clock, which is not the run's own; launch.env passes it to the ranks.
ASIDE = "LASTSTEP_FAULTS_ASIDE"
TRAINED, VALIDATED = b"s", b"v"  # the trace has one byte per batch begun; the first is the warm-up's
SIZE, CLASSES = 8, 10  # pixels across, kinds of image


class Blobs(Dataset[Any]):
    """Noisy images of CLASSES patterns, shifted and with new noise each time that one is read."""

    def __init__(self, samples: int, augment: bool) -> None:
        self.augment = augment
        draws = torch.Generator().manual_seed(samples)
        self.labels = torch.randint(CLASSES, (samples,), generator=draws)
        patterns = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        self.images = patterns[self.labels] + torch.randn(samples, 1, SIZE, SIZE, generator=draws)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:
            image = image.roll(int(torch.randint(-1, 2, ())), dims=2) + 0.1 * torch.randn(image.shape)
        return image, self.labels[index]


class Traced(Task):
    """A small network with batch norm and dropout. Each batch takes at least as many ms as the file `pace` says."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        aside, world = Path(os.environ[ASIDE]), detect_world()
        self.pace = aside / "pace"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.trace = os.open(aside / f"{world.attempt}.rank{world.rank}.trace", flags, 0o666)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        return Blobs(self.config.data.args["samples"], augment=True), Blobs(100, augment=False)

    def model(self) -> nn.Module:
        width = 32
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(width * SIZE**2, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 128).requires_grad_(False),  # its file is linked from save to save
            nn.Linear(128, CLASSES),
        )

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        os.write(self.trace, TRAINED if model.training else VALIDATED)
        time.sleep(float(self.pace.read_text()) / 1000)
        images, labels = batch
        logits = model(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": accuracy}

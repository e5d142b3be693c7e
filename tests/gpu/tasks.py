"""Tasks that tests train on a GPU, and the setup of their ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.faulty_tasks import Faulty
from trainer.config.config import Config
from trainer.tasks.classification import Classification
from trainer.world import device

LONG = 200_000_000_000  # clock cycles of a GPU: more than a minute


def share_the_gpu() -> None:
    """Make all ranks use the first GPU. NCCL would refuse that, so these ranks use gloo."""
    device._choose_device = lambda config, world: torch.device("cuda", 0)


class FaultyOnGPU(Faulty):
    """Like Faulty, with three more faults: "kernel" starts a GPU kernel that does not end, and the rank waits for it;
    "queues" starts one and does not wait, so that the CPU runs ahead as it does of a collective; "asks" requests more
    device memory than there is."""

    def befall(self) -> None:
        super().befall()
        if self.kind == "kernel":
            torch.cuda._sleep(LONG)
            torch.cuda.current_stream().synchronize()
        elif self.kind == "queues":
            torch.cuda._sleep(LONG)
        elif self.kind == "asks":
            torch.empty(1 << 50, dtype=torch.uint8, device=self.config.device)


class NeverWaits(Classification):
    """From its second step on, the rank must not wait for the GPU, except where a progress line needs the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.calls = -1  # the first is the warm-up's

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.calls += model.training
        if model.training and self.config.device == "cuda":
            train = self.config.train
            step = -(-self.calls // train.accumulate)
            torch.cuda.set_sync_debug_mode("default" if step < 2 or step % train.log_every == 0 else "error")
        return super().step(model, batch)

"""Tasks that tests train on a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from laststep.config.config import Config
from laststep.ranks.launchers import detect_world
from laststep.tasks.classification import Classification
from tests.support.tasks import Faulty

LONG = 200_000_000_000  # clock cycles of a GPU: more than a minute
MORE_THAN_FIT = 5_000  # kernels; a GPU's queue takes about a thousand


class FaultyOnGPU(Faulty):
    """Like Faulty, with more faults: "kernel" starts a GPU kernel that does not end, and the rank waits for it;
    "queues" starts one and does not wait, so that the CPU runs ahead as it does of a collective; "fills" does so and
    starts more kernels than the queue takes, so that the rank waits in the driver; "asks" requests more device memory
    than there is.

    A rank that a supervisor has started again has no fault. With LASTSTEP_TEST_KERNELS set, each step starts enough
    kernels for two steps behind a hanging collective to fill the queue, as those of a large model do.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.here = self.here and not detect_world().step_restarts

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = super().step(model, batch)
        if model.training and os.environ.get("LASTSTEP_TEST_KERNELS"):
            start_kernels()
        return output

    def befall(self) -> None:
        super().befall()
        if self.kind == "kernel":
            torch.cuda._sleep(LONG)
            torch.cuda.current_stream().synchronize()
        elif self.kind == "queues":
            torch.cuda._sleep(LONG)
        elif self.kind == "fills":
            torch.cuda._sleep(LONG)
            start_kernels()
        elif self.kind == "asks":
            torch.empty(1 << 50, dtype=torch.uint8, device=self.config.device)


def start_kernels() -> None:
    """Start more kernels than a GPU's queue takes."""
    number = torch.zeros(1, device="cuda")
    for _ in range(MORE_THAN_FIT):
        number.add_(1)


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


class Busy(Classification):
    """Each step multiplies large matrices for some 40 ms on an H200."""

    def model(self) -> nn.Module:
        self.factors = [torch.randn(8192, 8192, dtype=torch.bfloat16, device=self.config.device) for _ in "ab"]
        return super().model()

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if model.training:
            for _ in range(30):
                torch.mm(*self.factors)
        return super().step(model, batch)

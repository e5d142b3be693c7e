"""A task whose ranks wait until the trackers have been sent some steps, and then end in a given way."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.config.config import Config
from laststep.ranks.launchers import detect_world
from laststep.records.media import Histogram, Image, Table, Text
from laststep.rundir import RunDir
from laststep.tasks.classification import Classification
from laststep.track.trackers import CLASSES
from tests.support.custom_loops import Struck
from tests.support.project import DEADLINE_S
from tests.support.tasks import await_agreement

ENDS = "LASTSTEP_TEST_ENDS"  # "SIGKILL 0,1": the signal, and the ranks that get it


class Tracked(Classification):
    """In its sixth step of an attempt."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.run = RunDir(Path(config.launch.root) / str(config.launch.name))
        number, _, ranks = os.environ.get(ENDS, "").partition(" ")
        self.number = signal.Signals[number] if str(detect_world().rank) in ranks.split(",") else None
        self.steps = 0

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if model.training and self.number is not None:
            self.steps += 1
            if self.steps == 7:  # the warm-up is the first
                self.await_senders()
                os.kill(os.getpid(), self.number)
                await_agreement()
        return super().step(model, batch)

    def await_senders(self) -> None:
        """Wait until each tracker has been sent something in this attempt."""
        before = json.loads(os.environ.get("LASTSTEP_TEST_SENT", "{}"))
        deadline = time.monotonic() + DEADLINE_S
        while any(sent(self.run, name) <= before.get(name, 0) for name in CLASSES if self.wants(name)):
            assert time.monotonic() < deadline, f"nothing was sent within {DEADLINE_S:.0f} s"
            time.sleep(0.02)

    def wants(self, name: str) -> bool:
        return bool(vars(vars(self.config)["track"])[name])


def sent(run: RunDir, tracker: str) -> int:
    """The last step that a tracker was sent."""
    try:
        return int(json.loads((run.track(tracker) / "sent.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


def pictures(run: Run) -> None:
    """A loop that logs one of each kind in its third step and after the epoch, and is struck in its fourth."""
    struck = Struck(run)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for number, (inputs,) in enumerate(run.steps(run.loader(TensorDataset(torch.arange(60.0).view(20, 3)), 4)), 1):
            struck.strike("step")
            loss = model(inputs).pow(2).mean() / 1000
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            if number == 3:
                run.log(
                    seen=Image(inputs / 60), spread=Histogram(inputs), rows=Table(["x"], [[1.0]]), said=Text("hello")
                )
        run.log(last=Image(torch.ones(8, 8)))

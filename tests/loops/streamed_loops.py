"""A loop that trains on a stream, with state of several kinds beside its model."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laststep import Run
from laststep.data import streams
from tests.support.custom_loops import Struck


class Samples:
    """Says where it is, or, with LASTSTEP_TEST_COUNTED, does not."""

    def __init__(self) -> None:
        self.at = self.start = 0
        if not os.environ.get("LASTSTEP_TEST_COUNTED"):
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = self.begin_at

    def begin_at(self, state: dict[str, int]) -> None:
        """Continue there."""
        self.start = state["at"]

    def __deepcopy__(self, memo: Any) -> Samples:
        return Samples()

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        while self.at < 70:
            self.at += 1
            x = torch.full((3,), float(self.at)) / 70 + torch.rand(3) / 100
            yield x, x.sum(0, keepdim=True)


def streamed(run: Run) -> dict[str, float]:
    """Two epochs of 7 steps, with one worker; marks are exchanged every third step."""
    streams.EXCHANGE_STEPS = 3
    struck, model = Struck(run), nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    start = [parameter.detach().clone() for parameter in model.parameters()]  # the same on all ranks
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=numpy.float64(0.01))
    stream = run.stream(Samples(), 8, num_workers=1, shuffle=5)
    own, noise = random.Random(3), run.generator("noise")
    last: deque[float] = deque(maxlen=3)
    table = numpy.zeros(4)
    run.restore(model=parallel, optimizer=optimizer, own=own, last=last, table=table, start={"at": start})
    for _ in run.epochs(2):
        for batch in run.steps(stream, count=7):
            for x, y in run.shares(batch):
                loss = nn.functional.mse_loss(parallel(x + float(noise.random()) / 100), y)
                loss.backward()
                run.log(loss=loss, seen=x.sum())
            struck.strike("step")
            optimizer.step()
            optimizer.zero_grad()
            last.append(own.random())
            table += last[-1]
        run.log(own=float(table.sum() + sum(last)))
    return {"table": float(table.sum())}


def in_micro_batches(run: Run) -> None:
    """Eight steps of two micro-batches of a stream."""
    streams.EXCHANGE_STEPS = 3
    struck, model = Struck(run), DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stream = run.stream(Samples(), 8, num_workers=1, shuffle=5)
    run.restore(model=model, optimizer=optimizer)
    for x, _ in run.steps(stream, count=8, accumulate=2):
        model.require_backward_grad_sync = run.sync_gradients
        loss = model(x).square().mean()
        (loss / 2).backward()
        run.log(loss=loss, seen=x.sum())
        struck.strike("last" if run.sync_gradients else "first")
        if run.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()

"""A loop in which each rank plays a game of its own."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laststep import Run
from tests.support.custom_loops import Struck


class Game:
    """A walk, which ends at random, and begins again."""

    def __init__(self, seed: int) -> None:
        self.draws, self.at, self.ended = random.Random(seed), 0.0, 0

    def play(self) -> float:
        """One move."""
        self.at += self.draws.uniform(-1, 1)
        if self.draws.random() < 0.2:
            self.at, self.ended = 0.0, self.ended + 1
        return self.at


def played(run: Run) -> dict[str, float]:
    """Two epochs of 6 steps. The rank's game goes on between the epochs too, and a dict holds its last tensor."""
    struck, model = Struck(run), nn.Linear(4, 1)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
    game, last = Game(run.rank), {"seen": torch.zeros(4)}
    run.restore(model=parallel, optimizer=optimizer, game=run.own(game=game, last=last))
    for _ in run.epochs(2):
        for _ in run.steps(count=6):
            x = last["seen"].clone()
            last["seen"] = torch.tensor([game.play() for _ in range(4)])
            struck.strike("step")
            loss = nn.functional.mse_loss(parallel(x), last["seen"].sum().view(1))
            optimizer.zero_grad()
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
        game.play()
        for _ in run.validation(range(2)):
            struck.strike("validation")
        run.log(val_ended=game.ended)
    return {"ended": float(game.ended)}


def too_late(run: Run) -> None:
    """Plays after the update."""
    model, game = nn.Linear(1, 1), Game(run.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer, own=run.own(game=game))
    for _ in run.steps(count=4):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step == 2:
            game.play()


def refused(run: Run, what: Any) -> None:
    """Registers what cannot be restored."""
    model = nn.Linear(1, 1)
    run.restore(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), own=run.own(what=what))

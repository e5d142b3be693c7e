"""A loop whose state is a framework's own: nothing of it can be registered, and only all ranks together can save it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from laststep import Run
from tests.support.custom_loops import Struck

SIZE = 64  # weights


class Engine:
    """A framework that hides its state, of which each rank has a part: weights with momentum, trained by its own code.

    LASTSTEP_TEST_SAVE is what happens to it in a save, such as "kill 2 rank 1": in the second save of the attempt.
    """

    def __init__(self, run: Run) -> None:
        self._rank, self._size, self._rate = run.rank, run.size, 0.1
        self._own = slice(run.rank * SIZE // run.size, (run.rank + 1) * SIZE // run.size)
        self._weights = torch.linspace(-1, 1, SIZE)
        self._momentum = torch.zeros(SIZE)[self._own]
        self._fate, place, _, rank = (os.environ.get("LASTSTEP_TEST_SAVE") or "none 0 rank 0").split()
        self._left = int(place) if run.rank == int(rank) else 0

    def train(self, x: Tensor) -> Tensor:
        """One update; returns the loss, which is the same on every rank."""
        x = x + 0.1 * torch.randn_like(x)
        error = x @ self._weights - x.sum(1)
        gradient, loss = error @ x / len(x), error.square().mean()
        dist.all_reduce(gradient), dist.all_reduce(loss)
        self._momentum = 0.9 * self._momentum + gradient[self._own]
        parts = [torch.empty_like(self._momentum) for _ in range(self._size)]
        dist.all_gather(parts, self._weights[self._own] - self._rate / SIZE * self._momentum)
        self._weights = torch.cat(parts)
        return loss

    def cool_down(self) -> None:
        """Change the state after the steps of an epoch."""
        self._rate *= 0.5

    def measure(self, x: Tensor) -> float:
        """The loss, which all ranks compute together."""
        loss = (x @ self._weights - x.sum(1)).square().mean()
        dist.all_reduce(loss)
        return float(loss)

    def save(self, folder: Path) -> None:
        """A file of each rank in a subfolder, one of rank 0, a link to it, and an empty folder."""
        torch.rand(3)  # frameworks draw random numbers anywhere
        self._left -= 1
        (folder / "parts").mkdir(exist_ok=True)
        part = {"weights": self._weights[self._own].clone(), "momentum": self._momentum}
        torch.save(part, folder / "parts" / f"rank_{self._rank}.pt")
        if self._left == 0:
            self._suffer(folder)
        dist.barrier()
        if self._rank == 0:
            (folder / "engine.json").write_text(json.dumps({"rate": self._rate, "size": self._size}))
            (folder / "latest").symlink_to("engine.json")
            (folder / "nothing").mkdir()

    def load(self, folder: Path) -> None:
        """Load what all ranks have saved."""
        self._rate = json.loads((folder / "latest").read_text())["rate"]
        assert (folder / "nothing").is_dir()
        parts = [torch.load(folder / "parts" / f"rank_{rank}.pt") for rank in range(self._size)]
        self._weights = torch.cat([part["weights"] for part in parts])
        self._momentum = parts[self._rank]["momentum"]

    def _suffer(self, folder: Path) -> None:
        if self._fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fate == "raise":
            raise RuntimeError("the engine has lost a part")
        if self._fate == "hang":
            threading.Event().wait()
        if self._fate == "slow":
            for _ in range(90):
                time.sleep(0.1)
                with (folder / "trickle").open("a") as file:
                    file.write("x")


def hidden(run: Run) -> None:
    """Two epochs of 7 steps, each with a change of the hidden state and a validation after its steps.

    With LASTSTEP_TEST_BREAK a break ends each epoch's steps, after 5.
    """
    struck, breaks = Struck(run), "LASTSTEP_TEST_BREAK" in os.environ
    x = torch.randn(28, SIZE, generator=torch.Generator().manual_seed(1))
    loader, tests = run.loader(TensorDataset(x), 4), DataLoader(TensorDataset(x[:8]), 2)
    engine, best = Engine(run), {"loss": 1e9}
    run.checkpoint(engine.save, engine.load, best=best)
    for _ in run.epochs(2):
        for (inputs,) in run.steps(loader):
            struck.strike("step")
            run.log(loss=engine.train(inputs))
            if breaks and run.step % 7 == 5:
                break
        engine.cool_down()
        loss = 0.0
        for (inputs,) in run.validation(tests):
            struck.strike("validation")
            loss += engine.measure(inputs)
        best["loss"] = min(best["loss"], loss)
        run.log(val_loss=loss, noise=torch.rand(()))


def registers_instead(run: Run) -> None:
    """A loop that registers its state, or, with LASTSTEP_TEST_HIDES, has one hidden."""
    if "LASTSTEP_TEST_HIDES" in os.environ:
        return hidden(run)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for (x,) in run.steps(run.loader(TensorDataset(torch.ones(4, 2)), 4)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

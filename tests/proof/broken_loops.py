"""Hand-sized loops that each break one rule of a custom loop, as people write them; and one that breaks none.

6 steps an epoch, and a validation of 2 batches. They ask for `epochs` enough that a proof ends them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from laststep import Config, Run, Task

EPOCHS = 3


def samples() -> TensorDataset:
    """24 samples, the same in every process."""
    x = torch.arange(72.0).view(24, 3).sin()
    return TensorDataset(x, x.sum(1, keepdim=True))


class Parts:
    """What all of these loops have."""

    def __init__(self, run: Run, **more: Any) -> None:
        torch.manual_seed(1)
        self.run = run
        self.loader = run.loader(samples(), 4)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        run.restore(model=self.model, optimizer=self.optimizer, **more)

    def turns(self) -> Iterator[Any]:
        """The batches of all epochs, and a validation after each."""
        for _ in self.run.epochs(EPOCHS):
            yield from self.run.steps(self.loader)
            total = torch.zeros(())
            with torch.no_grad():
                for x, y in self.run.validation(DataLoader(samples(), 12)):
                    total += nn.functional.mse_loss(self.model(x), y)
            self.run.log(val_loss=total)

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """A forward and a backward pass."""
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.run.log(loss=loss)
        return loss.detach()

    def update(self) -> None:
        """The update of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def exact(run: Run) -> None:
    """Breaks no rule. It has what a proof must not mistake for a fault: a clock, an iterator and a generator of its own
    that change nothing."""
    parts, spare, seen = Parts(run), torch.Generator(), itertools.count()
    for x, y in parts.turns():
        torch.rand(1, generator=spare)
        next(seen)
        parts.backward(x + 0.1 * torch.randn_like(x), y)
        parts.update()
        run.log(clock=time.time())


def times(run: Run) -> None:
    """Breaks no rule, and registers the seconds of its steps. In the second step the clock shows the same in both
    undisturbed runs, as it does now and then."""
    seconds: list[float] = []
    parts = Parts(run, own=run.own(seconds=seconds))
    for x, y in parts.turns():
        seconds.append(float(run.name == "disturbed") if run.step == 1 else time.perf_counter())
        parts.backward(x, y)
        parts.update()


def prefetches(run: Run) -> None:
    """Trains on the batch of the turn before, as nanoGPT's loop does."""
    parts, ready = Parts(run), None
    for batch in parts.turns():
        x, y = ready or batch
        parts.backward(x, y)
        parts.update()
        ready = batch


def accumulates(run: Run) -> None:
    """Updates in every fourth turn."""
    parts = Parts(run)
    for x, y in parts.turns():
        parts.backward(x, y)
        if run.step % 4 == 3:
            parts.update()


def cycles(run: Run) -> None:
    """Takes half of each batch from a second loader, without end."""
    parts, second = Parts(run), itertools.cycle(DataLoader(samples(), 2))
    for x, y in parts.turns():
        more, labels = next(second)
        parts.backward(torch.cat([x, more]), torch.cat([y, labels]))
        parts.update()


def differs_by_rank(run: Run) -> None:
    """Registers what each rank has measured by itself."""
    meter = {"loss": torch.zeros(())}
    parts = Parts(run, meter=meter)
    for x, y in parts.turns():
        meter["loss"] = 0.9 * meter["loss"] + parts.backward(x, y)
        parts.update()


def draws(run: Run) -> None:
    """Draws noise from a generator of its own."""
    parts, noise = Parts(run), torch.Generator()
    for x, y in parts.turns():
        parts.backward(x + 0.1 * torch.randn(x.shape, generator=noise), y)
        parts.update()


def draws_in_shares(run: Run) -> None:
    """Draws noise for each share from a generator of its own."""
    parts, noise = Parts(run), torch.Generator()
    for batch in parts.turns():
        for x, y in run.shares(batch):
            parts.backward(x + 0.1 * torch.randn(x.shape, generator=noise), y)
        parts.update()


def draws_anew(run: Run) -> None:
    """Draws noise from a generator that the system's entropy seeds."""
    parts, noise = Parts(run), torch.Generator()
    noise.seed()
    for x, y in parts.turns():
        parts.backward(x + 0.1 * torch.randn(x.shape, generator=noise), y)
        parts.update()


def forgets(run: Run) -> None:
    """Scales its loss by an average that it does not register."""
    parts, average = Parts(run), 1.0
    for x, y in parts.turns():
        loss = parts.backward(x, y * average)
        average = 0.9 * average + 0.1 * float(loss)
        parts.update()


def counts(run: Run) -> None:
    """Logs a count of its own, and keeps a best loss of its own: the weights depend on neither."""
    parts, seen, best = Parts(run), 0, float("inf")
    for turn, (x, y) in enumerate(parts.turns()):
        seen += len(x)
        run.log(seen=seen, turn=turn)
        best = min(best, float(parts.backward(x, y)))
        parts.update()


class Forgetful(Task):
    """A Task that counts its steps down in an attribute."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = 1.0

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def datasets(self) -> Any:
        return samples(), samples()

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.scale *= 0.9
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1] * self.scale)}


def fails(run: Run) -> None:
    """Has a bug in its fourth step."""
    parts = Parts(run)
    for x, y in parts.turns():
        if run.step == 3:
            raise ValueError("a bug of the user's")
        parts.backward(x, y)
        parts.update()

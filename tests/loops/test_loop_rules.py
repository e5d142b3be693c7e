"""A loop that breaks a rule of docs/custom-loops.md ends with an error that names the rule. Without it the run would
train on, and a resume would silently end with other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from laststep import Run
from laststep.config.errors import ConfigError
from laststep.data.loader import StepLoader
from laststep.records.metrics import read_lines
from tests.support.loops import run_function

DATA = TensorDataset(torch.arange(40.0).view(20, 2) / 40)
Step = Callable[[Tensor], Tensor]  # the loss of a batch, after its backward pass


class Parts:
    """What every loop here needs: a loader of 5 steps, a model and its optimizer, registered."""

    def __init__(self, run: Run, **more: Any) -> None:
        self.loader: StepLoader = run.loader(DATA, 4)
        self.model = nn.Linear(2, 1).to(run.device)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        run.restore(model=self.model, optimizer=self.optimizer, **more)

    def backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def ends_with(function: Callable[[Run], Any], root: Path) -> str:
    """The error with which a run of this function ends."""
    with pytest.raises(ConfigError) as caught:
        run_function(function, root, "wrong")
    return str(caught.value)


@pytest.mark.parametrize(("every", "first", "found"), [(4, 3, 1), (2, 0, 2), (2, 1, 1), (1, 0, 5)])
def test_an_update_every_few_turns(every: int, first: int, found: int, tmp_path: Path) -> None:
    """The gradients that one turn leaves to the next are in no checkpoint. Found in the first two turns if the loop has
    always been like that, else in the second turn in a row."""

    def main(run: Run) -> None:
        parts = Parts(run)
        for (x,) in run.steps(parts.loader):
            parts.backward(x)
            if run.step % every == first and run.step not in (3, 4):
                parts.update()

    assert f"step {found} left gradients without an optimizer.step()" in ends_with(main, tmp_path)


def test_turns_without_an_update(tmp_path: Path) -> None:
    """Micro-batches within a turn, a bad batch that is left out, and an update that a scaler skips break no rule."""
    skipped = []

    def main(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu")
        parts = Parts(run, scaler=scaler)
        for (x,) in run.steps(parts.loader):
            if run.step == 1:
                continue
            if run.step == 2:
                parts.backward(x)
                parts.optimizer.zero_grad(set_to_none=False)
                continue
            parts.optimizer.zero_grad()
            for half in x.split(2):
                loss = parts.model(half).square().mean() * (float("inf") if run.step == 3 else 1.0)
                scaler.scale(loss).backward()
            scaler.step(parts.optimizer)
            scaler.update()
            skipped.append(not all(p.grad.isfinite().all() for p in parts.model.parameters() if p.grad is not None))

    run = run_function(main, tmp_path, "right")
    assert skipped == [False, True, False], "the scaler has skipped an update, and left its gradients"
    assert [line["step"] for line in read_lines(run.metrics) if "lr" in line] == [1, 2, 3, 4, 5]


def own_batches(run: Run) -> Iterator[Tensor]:
    """A batch drawn from torch's generator, without end."""
    while True:
        yield DATA.tensors[0][torch.randint(20, (4,))]


def test_a_batch_prefetched_across_turns(tmp_path: Path) -> None:
    """X = get_batch() at the end of each turn, for the next one: what is resumed after that has another X."""

    def main(run: Run) -> None:
        parts, batches = Parts(run), own_batches(run)
        x = next(batches)
        for _ in run.steps(count=5):
            parts.backward(x)
            x = next(batches)
            parts.update()

    assert "was made in the iteration of run.steps(...) before this one" in ends_with(main, tmp_path)


@pytest.mark.parametrize("name", ["scheduler", "scaler", "average", "optimizer"])
def test_what_was_not_registered(name: str, tmp_path: Path) -> None:
    """The classic mistake: a resumed run would begin the schedule anew, and nobody would notice."""

    def main(run: Run) -> None:
        parts = Parts(run)
        forgotten: dict[str, Callable[[], Any]] = {
            "scheduler": lambda: StepLR(parts.optimizer, 2),
            "scaler": lambda: torch.amp.GradScaler("cpu"),
            "average": lambda: AveragedModel(parts.model),
            "optimizer": lambda: SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9),
        }
        one = forgotten[name]()
        for (x,) in run.steps(parts.loader):
            parts.backward(x)
            parts.update()
            if isinstance(one, Optimizer):
                one.param_groups[0]["params"][0].grad = torch.ones(1, 2)
                one.step()

    message = ends_with(main, tmp_path)
    assert "is not registered, so a resumed run would begin it anew" in message and f", {name}=...)" in message


class Schedules:
    """An object of the user's that has schedules, and knows how to save them."""

    def __init__(self, schedules: list[StepLR]) -> None:
        self.by_name = {str(number): schedule for number, schedule in enumerate(schedules)}

    def state_dict(self) -> dict[str, Any]:
        return {name: schedule.state_dict() for name, schedule in self.by_name.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, of_one in state.items():
            self.by_name[name].load_state_dict(of_one)


def test_what_need_not_be_registered(tmp_path: Path) -> None:
    """Parts of what is registered, what has no state, what an iteration makes for itself, and what is gone."""

    def main(run: Run) -> None:
        loader, model = run.loader(DATA, 4), nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        schedule = SequentialLR(optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 3)], [2])
        average = AveragedModel(model)
        more = Schedules([StepLR(optimizer, 4)])
        run.restore(model=nn.ModuleDict({"a": average, "m": model}), optimizer=optimizer, schedule=schedule, more=more)
        plain, off = SGD(nn.Linear(2, 1).parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
        gone = StepLR(optimizer, 5)
        gone.itself = gone  # type: ignore[attr-defined]  # so that only the garbage collector ends it
        del gone
        for (x,) in run.steps(loader):
            inner = SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
            for each in (plain, inner):
                each.param_groups[0]["params"][0].grad = torch.ones(1, 2)
                each.step()
            optimizer.zero_grad()
            off.scale(model(x).square().mean()).backward()
            optimizer.step()

    assert len(read_lines(run_function(main, tmp_path, "right").metrics)) == 6


def test_run_steps_advanced_within_a_turn(tmp_path: Path) -> None:
    """A prefetcher around run.steps(...): the update of each step would be counted as the next step's."""

    def main(run: Run) -> None:
        parts = Parts(run)
        steps = run.steps(parts.loader)
        (x,) = next(steps)
        for (following,) in steps:
            parts.backward(x[:3])
            parts.update()
            x = following

    assert "was made in the iteration of run.steps(...) before this one" in ends_with(main, tmp_path)


def test_a_cycled_second_loader(tmp_path: Path) -> None:
    """Each attempt would start it from its first batch."""

    def main(run: Run) -> None:
        parts, second = Parts(run), iter(DataLoader(DATA, 2))
        for (x,) in run.steps(parts.loader):
            parts.backward(torch.cat([x, next(second)[0]]))
            parts.update()

    assert "run.batches(run.loader(dataset, batch_size))" in ends_with(main, tmp_path)


def test_what_stays_from_turn_to_turn_by_right(tmp_path: Path) -> None:
    """Constants, views of data in memory, registered tensors, whole loaders within a turn: none is a batch drawn too
    early."""

    def main(run: Run) -> None:
        hidden: dict[str, Tensor] = {"h": torch.zeros(4, 2)}
        parts, ones = Parts(run, hidden=hidden), torch.ones(4, 2)
        copy.deepcopy(parts.model)(ones)
        mask: Tensor | None = None
        for step in run.steps(count=5):
            mask = torch.ones(4, 2) if mask is None else mask
            for inputs in (ones, DATA.tensors[0][4 * step : 4 * step + 4], mask, hidden["h"]):
                parts.backward(inputs)
            hidden["h"] = hidden["h"] + parts.model.weight.detach()
            parts.update()
            whole = iter(DataLoader(DATA, 10))
            assert len(list(whole)) == 2

    assert len(read_lines(run_function(main, tmp_path, "right").metrics)) == 6


@pytest.mark.parametrize("inner", ["zip", "nested", "iterated"])
def test_a_loader_that_has_two_loops(inner: str, tmp_path: Path) -> None:
    """Only one loop over run.steps(...) counts the steps; the message names what a second loader is for."""

    def main(run: Run) -> None:
        parts = Parts(run)
        if inner == "zip":
            list(zip(run.steps(parts.loader), run.steps(parts.loader)))
        for _ in run.steps(parts.loader):
            list(run.steps(parts.loader) if inner == "nested" else parts.loader)

    assert "more = run.batches(" in ends_with(main, tmp_path)


def test_an_update_before_anything_is_registered(tmp_path: Path) -> None:
    """A script that was not adapted is stopped at its first update, not after days, when it returns."""
    updates = []

    def main(run: Run) -> None:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(DATA, 4):
            model(x).sum().backward()
            optimizer.step()
            updates.append(1)

    assert "an optimizer's step() before run.restore(...)" in ends_with(main, tmp_path) and not updates


def test_a_loop_past_run_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is registered, but no step is counted: nothing would be saved."""
    said: list[str] = []
    monkeypatch.setattr("laststep.records.progress.say", said.append)

    def main(run: Run) -> None:
        parts = Parts(run)
        for (x,) in DataLoader(DATA, 4):
            parts.backward(x)
            parts.update()

    assert "ended without a step of run.steps(...)" in ends_with(main, tmp_path)
    assert len([line for line in said if "WARNING: an optimizer's step() before the loop" in line]) == 1


def test_a_loop_that_draws_its_own_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the numbers of its steps. The speed is in samples only where their number is known."""
    said: list[str] = []
    monkeypatch.setattr("laststep.records.progress.say", said.append)

    def main(run: Run) -> None:
        parts, batches = Parts(run), own_batches(run)
        for epoch in run.epochs(2):
            for step in run.steps(count=4, samples=4 * epoch):
                assert step == run.step
                run.log(loss=parts.backward(next(batches)))
                parts.update()

    run = run_function(main, tmp_path, "own")
    steps = [line for line in read_lines(run.metrics) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9)) and len({line["loss"] for line in steps}) == 8
    assert [("steps/s" in line, "samples/s" in line) for line in said if "step " in line and " left" in line] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]
    assert "run.steps() needs a loader" in ends_with(lambda run: run.steps(), tmp_path)


class Wrapper(Optimizer):
    """An optimizer around an optimizer, like Accelerate's: it is one by its type alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


class Lookahead(Wrapper):
    """A wrapper with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "slow": [torch.ones(2)]}


def test_wrapped_optimizers(tmp_path: Path) -> None:
    """A wrapper is registered as what is in it, so that its updates are seen. One with a state of its own is not."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    wrapper = Wrapper(Wrapper(optimizer))

    def main(run: Run) -> None:
        loader = run.loader(DATA, 4)
        run.restore(model=model, optimizer=wrapper)
        for (x,) in run.steps(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            wrapper.step()

    assert [line["lr"] for line in read_lines(run_function(main, tmp_path, "right").metrics) if "lr" in line] == [
        0.1
    ] * 5

    def slow(run: Run) -> None:
        run.restore(model=model, optimizer=Lookahead(SGD(model.parameters(), lr=0.1)))

    assert "of a wrapper with a state of its own, also the optimizer in it" in ends_with(slow, tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_loader(workers: int, tmp_path: Path) -> None:
    """Its batches follow from the step, however many of them a turn draws and whatever loads them, and drawing them
    changes no other random number. It cycles."""
    drawn: dict[str, list[list[float]]] = {}

    class Samples(Dataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Tensor:
            return index + torch.rand(()) / 2

    def main(run: Run, name: str, skips: bool) -> None:
        more = run.batches(run.loader(Samples(), 4, workers, persistent_workers=False), per_step=2)
        parts = Parts(run)
        for (x,) in run.steps(parts.loader):
            run.log(noise=torch.rand(()))
            taken = [next(more).tolist() for _ in range(run.step % 3 if skips else 2)]
            drawn.setdefault(name, []).extend(taken + [[]] * (2 - len(taken)))
            run.log(loss=parts.backward(x), later=torch.rand(()))
            parts.update()

    runs = {name: run_function(lambda run: main(run, name, name == "few"), tmp_path, name) for name in ("all", "few")}  # noqa: B023
    assert [few or every for few, every in zip(drawn["few"], drawn["all"])] == drawn["all"]
    assert sorted(int(x) for batch in drawn["all"][:2] for x in batch) == list(range(6)), "once over the data"
    noise = [[line.get("later") for line in read_lines(run.metrics)] for run in runs.values()]
    assert noise[0] == noise[1]


def test_a_second_loader_out_of_its_turn(tmp_path: Path) -> None:
    """Before the first turn, or once more than its number per step: the next turn's batch would be another."""

    def early(run: Run) -> None:
        next(run.batches(Parts(run).loader))

    def much(run: Run) -> None:
        parts = Parts(run)
        more = run.batches(parts.loader)
        for _ in run.steps(count=2):
            next(more), next(more)

    assert "outside the iterations of run.steps(...)" in ends_with(early, tmp_path)
    assert "write run.batches(loader, per_step=2)" in ends_with(much, tmp_path)


def test_data_that_cannot_start_in_the_middle(tmp_path: Path) -> None:
    """A stream has no order that could be continued; the message names what a loop can do instead."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert "run.steps(run.stream(data, batch_size), count=N)" in ends_with(
        lambda run: run.loader(Stream(), 2), tmp_path
    )
    assert "there are only 20 samples" in ends_with(lambda run: run.loader(DATA, 32, drop_last=True), tmp_path)

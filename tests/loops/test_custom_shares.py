"""A custom loop with train.shares ends with the same bits on any number of ranks that fits, as a Task does; and one
that could not is refused.

Nobody sees a share that was left out, or summed twice, in the curves: it would only be another experiment.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.data.loader import StepLoader
from laststep.frameworks.steps import FrameworkSteps
from laststep.records.metrics import read_lines
from tests.support.loops import run_function
from tests.support.ranks import Attempt, fingerprint, reasons, train


def config(root: Path, name: str, ranks: int, task: str, *options: str) -> Config:
    """A small run of a function in tests/loops/shared_loops.py, in four shares."""
    place = [f"launch.root={root}", f"launch.name={name}", f"launch.tasks_per_node={ranks}"]
    options_for_all = ["device=cpu", "train.shares=4", "train.log_every=3", "launch.max_failures=9"]
    options_for_all += [f"checkpoint.every_{what}=null" for what in ("epochs", "minutes")]  # saves at stops and rescues
    return Config.load(None, [f"task=tests.loops.shared_loops.{task}", *options_for_all, *options, *place])


def test_any_number_of_ranks(tmp_path: Path) -> None:
    """Undisturbed on one rank; and on 4, then 2, then 1, killed or stopped in mid-epoch each time, and in a validation.
    The loop has all that a custom loop may have: see there."""
    one = train(config(tmp_path, "one", 1, "thorough"))
    expected = fingerprint(one)
    places: tuple[tuple[int, str], ...] = (
        (4, "SIGKILL step 3 rank 1"),
        (2, "SIGTERM step 3 rank 0"),
        (4, "SIGTERM validation 1 rank 3"),
        (1, "SIGTERM step 5 rank 0"),
        (2, ""),
    )
    for ranks, place in places:
        attempt = Attempt(config(tmp_path, "resized", ranks, "thorough"), {"LASTSTEP_TEST_SIGNAL": place})
        attempt.wait()
        assert "last bits may differ" not in attempt.output()
    records = read_lines(attempt.run.attempts)
    assert [record["world_size"] for record in records] == [ranks for ranks, _ in places], attempt.output()
    assert [record["lost_steps"] for record in records] == [0] * len(places)
    assert reasons(attempt.run)[-1] == "finished"
    assert fingerprint(attempt.run) == expected
    updates = [line["norm"] is not None for line in read_lines(one.metrics) if "norm" in line]
    assert not updates[0] and any(updates), "the scaler has skipped updates, but not all"


def test_own_batches_and_two_models(tmp_path: Path) -> None:
    """The loop draws each share's batch itself."""
    one, four = (train(config(tmp_path, f"on-{n}", n, "draws")) for n in (1, 4))
    assert fingerprint(one) == fingerprint(four)
    assert len({line["loss"] for line in read_lines(one.metrics) if "loss" in line}) == 4


# --- one rank, with two shares

DATA = TensorDataset(torch.arange(14.0).view(7, 2) / 14)


class Parts:
    """What every loop here needs: a loader of 2 steps, a model and its optimizer, registered."""

    def __init__(self, run: Run, **options: Any) -> None:
        torch.manual_seed(1)
        self.run = run
        self.loader: StepLoader = run.loader(DATA, 4)
        self.model = DistributedDataParallel(nn.Linear(2, 1), **options)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        run.restore(model=self.model, optimizer=self.optimizer)

    def backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss

    def each(self, batch: Any, *acts: Callable[[Tensor], Any]) -> list[Any]:
        """Do these with each share."""
        return [act(x) for (x,) in self.run.shares(batch) for act in acts]

    def update(self, *_: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def run_in_shares(step: Callable[[Parts, Any], Any], root: Path, *options: str, **of_ddp: Any) -> Parts:
    """A run whose steps are made by this function, up to its update."""
    made = []

    def main(run: Run) -> None:
        parts = Parts(run, **of_ddp)
        made.append(parts)
        for batch in run.steps(parts.loader):
            step(parts, batch)
            parts.update()

    run_function(main, root, "shares", *(options or ["train.shares=2"]))
    return made[0]


def test_gradients_are_means_over_the_batch(tmp_path: Path) -> None:
    """Also over the short last batch of 3 samples: one share has all of them, the other none that counts."""
    seen = []

    def step(parts: Parts, batch: Any) -> None:
        parts.each(batch, lambda x: parts.run.log(loss=parts.backward(x), size=len(x)))
        seen.append([p.grad.clone() for p in parts.model.parameters() if p.grad is not None])

    parts = run_in_shares(step, tmp_path)
    plain = nn.Linear(2, 1)
    losses = [line["loss"] for line in read_lines(tmp_path / "shares" / "metrics.jsonl") if "lr" in line]
    torch.manual_seed(1)
    plain.load_state_dict(nn.Linear(2, 1).state_dict())
    for number, found in enumerate(seen):
        plain.zero_grad()
        loss = plain(DATA[torch.tensor(parts.loader.order.batch(number))][0]).square().mean()
        loss.backward()
        assert losses[number] == pytest.approx(loss.item(), rel=1e-5)
        for parameter, gradient in zip(plain.parameters(), found):
            torch.testing.assert_close(parameter.grad, gradient)
            parameter.data -= 0.1 * gradient


def no_sync(parts: Parts, x: Tensor) -> None:
    with parts.model.no_sync():
        parts.backward(x)


def stops_early(parts: Parts, batch: Any) -> None:
    for (x,) in parts.run.shares(batch):
        parts.backward(x)
        break


def left(parts: Parts, batch: Any) -> None:
    for parameter in parts.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parts.each(batch, parts.backward)


WRONG: dict[str, tuple[Callable[[Parts, Any], Any], str]] = {
    "no-shares": (lambda parts, batch: None, "step 1 has computed none of its shares: with train.shares a batch of"),
    "unpacks": (lambda parts, batch: parts.backward(*batch), "write `for batch in run.shares(batch):`"),
    "indexes": (lambda parts, batch: parts.backward(batch["x"]), "write `for batch in run.shares(batch):`"),
    "moves": (lambda parts, batch: batch.to("cpu"), "write `for batch in run.shares(batch):`"),
    "updates-within": (
        lambda parts, batch: parts.each(batch, parts.backward, parts.update),
        "step 1 would end after 0 of this rank's 2 shares",
    ),
    "stops-early": (
        stops_early,
        "step 1 would end after 0 of this rank's 2 shares: let the loop over run.shares(batch)",
    ),
    "twice": (
        lambda parts, batch: (parts.each(batch, parts.backward), parts.each(batch, parts.backward)),
        "run.shares(batch) takes the batch that this iteration",
    ),
    "another": (lambda parts, batch: parts.each(DATA[:], parts.backward), "run.shares(batch) takes the batch that"),
    "outside": (
        lambda parts, batch: (parts.each(batch, parts.backward), parts.backward(torch.ones(2, 2))),
        "a backward pass outside of run.shares(batch)",
    ),
    "two-passes": (
        lambda parts, batch: parts.each(batch, parts.backward, parts.backward),
        "a backward pass after the one that sums",
    ),
    "after-the-sum": (
        lambda parts, batch: parts.each(batch, parts.backward, lambda x: no_sync(parts, x)),
        "a backward pass after the one that sums",
    ),
    "no-sync": (
        lambda parts, batch: parts.each(batch, lambda x: no_sync(parts, x)),
        "step 1 has not summed all gradients over the ranks",
    ),
    "module": (
        lambda parts, batch: parts.each(batch, lambda x: parts.model.module(x).sum().backward()),
        "step 1 has not summed all gradients over the ranks",
    ),
    "left": (left, "step 1 has gradients before its shares"),
    "some-log": (
        lambda parts, batch: parts.each(batch, parts.backward, lambda x: parts.run.log(**{f"x{x.sum():.0f}": 1})),
        "logged in some shares only",
    ),
    "per-step": (
        lambda parts, batch: parts.run.batches(parts.loader, per_step=2),
        "run.batches(..., per_step=2): with train.shares each share has one batch",
    ),
    "second-loader": (
        lambda parts, batch: next(parts.run.batches(parts.loader)),
        "or of run.shares(...) with train.shares",
    ),
    "divides": (lambda parts, batch: parts.run.loader(DATA, 3), "(batch_size=3): not divisible by 2 shares"),
    "contradicts": (
        lambda parts, batch: parts.run.loader(DATA, 8, shares=4),
        "run.loader(shares=4): train.shares is 2, and decides how the ranks start; set train.shares=4",
    ),
}


@pytest.mark.parametrize(("step", "message"), WRONG.values(), ids=list(WRONG))
def test_refused(step: Callable[[Parts, Any], Any], message: str, tmp_path: Path) -> None:
    """One line names what to write. Before the first update, on any number of ranks."""
    with pytest.raises(ConfigError) as caught:
        run_in_shares(step, tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("find-unused", "every parameter must receive a gradient in every share"),
        ("own-hook", "has a communication hook of its own"),
        ("not-wrapped", "run.restore(optimizer=...): updates parameters of no registered DistributedDataParallel"),
        ("averages", "leave out run.averages_gradients"),
        ("saves-itself", "run.checkpoint(...), or this key"),
    ],
)
def test_registrations_that_are_refused(wrong: str, message: str, tmp_path: Path) -> None:
    """DistributedDataParallel has to make the sum, on one rank too: a resume on more must not differ."""

    def main(run: Run) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 1), find_unused_parameters=wrong == "find-unused")
        if wrong == "own-hook":
            ddp.register_comm_hook(None, lambda _, bucket: bucket)
        model = ddp.module if wrong == "not-wrapped" else ddp
        optimizer = SGD(model.parameters(), lr=0.1)
        run.averages_gradients = wrong == "averages"
        if wrong == "saves-itself":
            run.checkpoint(lambda folder: None, lambda folder: None, optimizer=optimizer)
        run.restore(model=model, optimizer=optimizer)

    with pytest.raises(ConfigError) as caught:
        run_function(main, tmp_path, "wrong", "train.shares=2")
    assert message in str(caught.value)


def test_the_loop_of_a_framework_is_refused(tmp_path: Path) -> None:
    """It takes its batches as they are."""

    def main(run: Run) -> None:
        FrameworkSteps(run, run.loader(DATA, 4), lambda: (1, None))

    with pytest.raises(ConfigError, match=r"train.shares=2: a framework's own loop cannot compute in shares"):
        run_function(main, tmp_path, "wrong", "train.shares=2")


def test_the_same_loop_without_shares(tmp_path: Path) -> None:
    """run.shares(batch) is the batch itself then, so one loop serves both; a loop that demands shares is refused."""
    seen: list[Any] = []

    def step(parts: Parts, batch: Any) -> None:
        seen.extend(each is batch for each in parts.run.shares(batch))
        parts.backward(batch[0])
        with pytest.raises(ConfigError, match=r"train.shares is not set, and decides .* set train.shares=2"):
            parts.run.loader(DATA, 4, shares=2)

    run_in_shares(step, tmp_path, "seed=0")
    assert seen == [True, True]

"""run.steps(..., accumulate=k): a step of k micro-batches makes one update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.config.errors import ConfigError
from tests.support.loops import lines, run_function

DATA = TensorDataset(torch.arange(22.0).view(11, 2) / 22)


def parts(run: Run) -> tuple[nn.Linear, SGD]:
    """A registered model and its optimiser."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    return model, optimizer


def test_a_step_is_an_update(tmp_path: Path) -> None:
    """11 micro-batches, 4 to a step: 3 steps an epoch, the last with what is left. Each sample is used once, and the
    line of a step has the mean over its micro-batches."""
    seen: list[list[Tensor]] = []
    lengths: list[int] = []

    def main(run: Run) -> None:
        model, optimizer = parts(run)
        loader = run.loader(DATA, 1)
        for _ in run.epochs(2):
            batches = run.steps(loader, accumulate=4)
            lengths.append(len(batches))
            seen.append([])
            for number, (x,) in enumerate(batches):
                assert run.sync_gradients == (number in (3, 7, 10))
                assert run.step == number // 4 + 3 * (len(seen) - 1)
                seen[-1].append(x)
                model(x).sum().backward()
                if run.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                run.log(first=x[0, 0])  # the last one after the update

    found = [line for line in lines(run_function(main, tmp_path, "steps", "train.log_every=1")) if "first" in line]
    assert lengths == [11, 11] and [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for epoch in seen:
        assert sorted(x.tolist() for x in epoch) == sorted(x[None].tolist() for x in DATA.tensors[0])
    firsts = [float(x[0, 0]) for epoch in seen for x in epoch]
    cuts = [(0, 4), (4, 8), (8, 11), (11, 15), (15, 19), (19, 22)]
    assert [line["first"] for line in found] == pytest.approx([sum(firsts[a:b]) / (b - a) for a, b in cuts])


def test_own_batches(tmp_path: Path) -> None:
    """Each micro-batch has random numbers of its own; the first those of a step without accumulation."""
    drawn: dict[int, list[tuple[int, float]]] = {}

    def main(run: Run, accumulate: int) -> None:
        model, optimizer = parts(run)
        steps = run.steps(count=3, samples=8, accumulate=accumulate)
        assert len(steps) == 3 * accumulate
        for step in steps:
            x = torch.randn(1, 2)
            drawn.setdefault(accumulate, []).append((step, float(x[0, 0])))
            model(x).sum().backward()
            if run.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()

    for accumulate in (1, 2):
        run_function(lambda run: main(run, accumulate), tmp_path, f"own{accumulate}")  # noqa: B023
    assert [step for step, _ in drawn[2]] == [0, 0, 1, 1, 2, 2]
    assert drawn[2][::2] == drawn[1] and len({x for _, x in drawn[2]}) == 6


def refused(tmp_path: Path, accumulate: Any, every: int, *options: str) -> str:
    """What is said of a loop that updates in every so many iterations."""

    def main(run: Run) -> None:
        model, optimizer = parts(run)
        for number, (x,) in enumerate(run.steps(run.loader(DATA, 1), accumulate=accumulate)):
            model(x).sum().backward()
            if number % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(ConfigError) as caught:
        run_function(main, tmp_path, "wrong", *options)
    return str(caught.value)


def test_refused(tmp_path: Path) -> None:
    """An update elsewhere than in the last micro-batch would be lost, or made twice; each line says what to write."""
    assert "write run.steps(..., accumulate=K), and `if run.sync_gradients:`" in refused(tmp_path, 1, 2)
    assert "an optimizer.step() in micro-batch 2 of 4: with run.steps(..., accumulate=4)" in refused(tmp_path, 4, 2)
    assert "step 1 left gradients without an optimizer.step()" in refused(tmp_path, 2, 4)
    for wrong in (0, 2.0, "4"):
        assert f"run.steps(accumulate={wrong!r}): must be a number" in refused(tmp_path, wrong, 1)

"""No checkpoint restores in which mode modules are and what is frozen. A loop that does not set them again would end
with other results after a resume, without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.checkpoint.manager import Position
from laststep.loops.loop_rules import OTHER_FROZEN, OTHER_MODE, Modes
from tests.support.loops import run_function

DATA = TensorDataset(torch.arange(40.0).view(20, 2) / 40)


class Crash(Exception):
    """Ends the first attempt."""


def warnings(kind: str, crash_after: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run says that ends after so many steps, and then resumes, with epochs of 5 steps."""
    said: list[str] = []
    monkeypatch.setattr("laststep.records.progress.say", said.append)
    crashes = [crash_after]

    def main(run: Run) -> None:
        loader = run.loader(DATA, 4)
        model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        optimizer = SGD(model.parameters(), lr=0.1)
        run.restore(model=model, optimizer=optimizer)
        model[0].requires_grad_(kind not in ("thaws once", "thaws"))
        for epoch in run.epochs(2):
            if kind == "thaws by epoch" and epoch == 0:
                model[0].requires_grad_(False)
            if kind == "thaws by epoch" and epoch == 1:
                model[0].requires_grad_(True)
            for (x,) in run.steps(loader):
                if kind == "validates":
                    model.train()
                if run.step == 1 if kind == "thaws once" else run.step >= 1 and kind == "thaws":
                    model[0].requires_grad_(True)
                loss: Tensor = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if kind in ("validates", "forgets to train"):
                    model.eval()
                if crashes == [run.step]:
                    raise Crash

    every = ("checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    with pytest.raises(Crash):
        run_function(main, root, "run", *every)
    assert not [line for line in said if "WARNING" in line], "before a resume there is nothing to compare with"
    crashes.clear()
    run_function(main, root, "run", *every)
    assert any("resuming after step" in line for line in said)
    return [line for line in said if "WARNING" in line]


@pytest.mark.parametrize(("kind", "line"), [("forgets to train", OTHER_MODE), ("thaws once", OTHER_FROZEN)])
def test_what_is_not_set_again(kind: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """model.eval() after the first step, for good; a layer that is frozen at the start, and thawed in one step."""
    assert warnings(kind, 3, tmp_path, monkeypatch) == [line]


@pytest.mark.parametrize(("kind", "crash_after"), [("validates", 3), ("thaws", 3), ("thaws by epoch", 5), ("plain", 3)])
def test_what_is_set_again(kind: str, crash_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes that differ between the updates, or from epoch to epoch, are no fault."""
    assert warnings(kind, crash_after, tmp_path, monkeypatch) == []


def test_wrappers_do_not_count() -> None:
    """A run may resume with more ranks, and so with DistributedDataParallel, or with torch.compile."""
    said: list[str] = []
    model, plain, wrapped = nn.Linear(2, 1), Modes(said.append), Modes(said.append)
    wrapper = nn.Sequential(nn.Sequential(model)).eval()
    model.train()
    plain.update_begins([model])
    wrapped.resume(Position(batches=1, modes=plain.fingerprint))
    wrapped.update_begins([wrapper])
    assert said == []
    wrapped.resume(Position(batches=1, modes=plain.fingerprint))
    model.eval()
    wrapped.update_begins([wrapper])
    assert said == [OTHER_MODE]

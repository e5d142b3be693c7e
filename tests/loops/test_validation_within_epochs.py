"""Validations within epochs: each has a line, and the best weights are kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.checkpoint.export import read_run
from laststep.checkpoint.store import CheckpointStore
from laststep.config.errors import ConfigError
from laststep.config.keep import Ranking
from laststep.records.metrics import read_lines
from laststep.report.curves import read_curves
from laststep.rundir import RunDir
from tests.support.loops import run_function

SAVES = ("checkpoint.every_epochs=null", "checkpoint.asynchronous=false", "checkpoint.keep_last=1")


def validating(accuracies: dict[int, float], before_update: bool = False) -> Any:
    """A loop of 6 steps that measures these accuracies within these steps (from 1), after the update or before it."""

    def main(run: Run) -> None:
        loader = run.loader(TensorDataset(torch.arange(24.0).view(12, 2) / 24), 2)
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        run.restore(model=model, optimizer=optimizer)

        def validate() -> None:
            if run.step + 1 in accuracies:
                assert len(list(run.validation(range(2)))) == 2
                run.log(val_accuracy=torch.tensor(accuracies[run.step + 1]), other=run.step)

        for (x,) in run.steps(loader):
            if before_update:
                validate()
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
            if not before_update:
                validate()
        run.log(done=1)

    return main


def steps_and_values(run: RunDir) -> list[tuple[int, str, float | None]]:
    """The lines of metrics.jsonl in order: each step, what kind of line it is, and its accuracy."""
    kinds = [
        (line, "step" if "time" in line else "end" if "done" in line else "val") for line in read_lines(run.metrics)
    ]
    return [(line["step"], kind, line.get("val_accuracy")) for line, kind in kinds]


def test_the_best_weights_are_kept(tmp_path: Path) -> None:
    """Although no save was due there. The report draws the validations at their steps."""
    accuracies = {2: 0.25, 3: 0.75, 5: 0.5}
    run = run_function(validating(accuracies), tmp_path, "best", *SAVES, "checkpoint.best_by=val_accuracy:max")
    store = CheckpointStore(run.checkpoints)
    assert store.steps() == [3, 6] and store.manifest(3).metrics["val_accuracy"] == 0.75
    assert read_run(run, best=True).manifest.step == 3
    values = [(step, "val", accuracies[step]) for step in accuracies]
    assert [line for line in steps_and_values(run) if line[1] == "val"] == values
    assert steps_and_values(run)[1:3] == [(2, "step", None), (2, "val", 0.25)], "beside the step's own line"
    assert {"loss", "lr", "other"} <= read_lines(run.metrics)[1].keys(), "other values stay in the step's line"
    curves = read_curves(run.metrics, [])
    assert curves.validated_within_epochs
    assert [point.first for point in curves.validation_by_step["val_accuracy"].points] == [2, 3, 5]


def test_the_lowest_loss_is_the_default(tmp_path: Path) -> None:
    """An accuracy is then only recorded, and costs no save."""
    run = run_function(validating({2: 0.25, 3: 0.75}), tmp_path, "default", *SAVES)
    assert CheckpointStore(run.checkpoints).steps() == [6]


def test_a_validation_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """The epoch's own line, which does not have its values, does not take them from the checkpoint."""
    run = run_function(validating({6: 0.5}), tmp_path, "end", *SAVES, "checkpoint.best_by=val_accuracy:max")
    assert CheckpointStore(run.checkpoints).manifest(6).metrics["val_accuracy"] == 0.5
    assert steps_and_values(run)[-2:] == [(6, "val", 0.5), (6, "end", None)]


def test_a_validation_before_the_update(tmp_path: Path) -> None:
    """It is of the weights that the step before has left, and its line says so. They are gone when the step is over."""
    options = (*SAVES, "checkpoint.best_by=val_accuracy:max")
    run = run_function(validating({1: 0.5, 3: 0.75}, before_update=True), tmp_path, "before", *options)
    assert [line for line in steps_and_values(run) if line[0] < 4] == [
        (0, "val", 0.5),
        (1, "step", None),
        (2, "step", None),
        (2, "val", 0.75),
        (3, "step", None),
    ]
    assert CheckpointStore(run.checkpoints).steps() == [6]


@pytest.mark.parametrize("text", ["val_accuracy", "val_accuracy:highest", ":max", ""])
def test_a_ranking_is_not_guessed(text: str) -> None:
    """With the wrong direction the worst checkpoint would be kept."""
    with pytest.raises(ConfigError, match=r"checkpoint\.best_by="):
        Ranking.parse(text)


def test_ranking() -> None:
    """A missing value, and one that is not finite, ranks nowhere."""
    highest, lowest = Ranking.parse("val_f1:max"), Ranking.parse("val_loss")
    assert highest.badness({"val_f1": 0.5}) == -0.5 and lowest.badness({"val_loss": 0.5}) == 0.5
    assert all(math.isnan(highest.badness({"val_f1": value})) for value in (None, math.nan, math.inf))
    assert math.isnan(highest.badness({}))

"""A finished run that is given a later end: it continues as if it had never ended.

With a constant learning rate nothing depends on where a run ends, so an extended run must equal one that was that long
from the beginning: the same weights, and each step and each epoch once in metrics.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laststep.config.config import Config
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import config, undisturbed_folder, undisturbed_run

CONSTANT = ("optim.schedule=constant",)


@pytest.mark.parametrize("first_end", ["train.epochs=1", "train.max_steps=10"])
def test_a_task(root: Path, first_end: str) -> None:
    """An end within an epoch has written a line for that epoch: the extended run replaces it when the epoch is over."""
    run = train(config(root, f"task-{first_end.replace('=', '-')}", 1, (*CONSTANT, first_end)))
    longer = config(root, run.name, 1, CONSTANT)
    assert fingerprint(train(longer)) == undisturbed_run(longer)
    assert json.loads(run.plan.read_text())["total_steps"] == 14


def test_an_earlier_end(root: Path) -> None:
    """A configuration that was edited by hand must not train on without an end."""
    run = train(config(root, "earlier", 1, CONSTANT))
    refused = Attempt(config(root, run.name, 1, (*CONSTANT, "train.max_steps=9")))
    refused.wait()
    assert "train.epochs, train.max_steps: end the run at step 9; it is at 14" in refused.output()


def custom(root: Path, name: str, epochs: int) -> Config:
    """A run of a custom loop that has as many epochs as the configuration."""
    words = ["task=tests.support.custom_loops.as_long_as_configured", "device=cpu", f"train.epochs={epochs}"]
    return Config.load(None, [*words, f"launch.root={root}", f"launch.name={name}"])


def test_a_custom_loop(root: Path) -> None:
    """Its checkpoint says that the function has returned; with a later end the function is called again."""
    run = train(custom(root, "custom", 1))
    longer = custom(root, "custom", 3)
    assert fingerprint(train(longer)) == undisturbed_run(longer)
    before = undisturbed_folder(longer).metrics.read_bytes()
    train(longer.__class__.load(undisturbed_folder(longer).config))
    assert undisturbed_folder(longer).metrics.read_bytes() == before, "a finished run is not trained again"
    assert json.loads(run.plan.read_text())["total_steps"] == 9

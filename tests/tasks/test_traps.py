"""What was typed is what trains: a key that nothing reads, or a Task that is not quite one, ends before step 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.cli.main import main
from tests.support.commands import begin, end, refusal
from tests.support.forked import forked_python
from tests.support.project import PROJECT

MODULE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

from laststep import Task

DATA = TensorDataset(torch.arange(64.0).unsqueeze(1))


class Line(Task):
    def datasets(self):
        return DATA, DATA

    def model(self):
        return nn.Linear(1, getattr(self.args, "width", 4))

    def step(self, model, batch):
        return {"loss": model(batch[0]).square().mean()}


class Late(Line):
    reads = ("model.name",)


class FailsInValidation(Line):
    def step(self, model, batch):
        if not model.training:
            raise KeyError("accuracy")
        return super().step(model, batch)


class OneSet(Line):
    def datasets(self):
        return [DATA]


class NoConfig(Line):
    def __init__(self):
        pass


class Bias(Line):
    def model(self):
        return nn.Linear(1, 1, bias=self.config.args.bias)
"""
WORDS = ("train.batch_size=8", "train.epochs=1", "device=cpu", "launch.tasks_per_node=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a module of Tasks."""
    (tmp_path / "own.py").write_text(MODULE)
    return tmp_path


def trained(folder: Path, *words: str, status: int) -> str:
    """What the last line says of a run that is started here; it leaves no folder behind if it is refused."""
    command = [forked_python(), str(PROJECT / "launch.py"), "--local", "--name", "run", *words]
    said, errors = end(begin(folder, command), status)
    assert (folder / "runs" / "run").exists() == (status != 2)
    return (said + errors).strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data.name=mnits", "data.name: task=own.Line does not read it, so it would change nothing"),
        ("model.args.foo=1", "model.args.foo: task=own.Line does not read it"),
        ("optim.decay_share=0.3", "optim.decay_share: task=own.Line does not read it"),
        ("args.widht=64", "args.widht: task=own.Line does not read it, so it would change nothing; of args it reads"),
    ],
)
def test_a_key_that_nothing_reads(word: str, says: str, folder: Path) -> None:
    """A sweep over it would be several runs of the same training, labelled as if they differed."""
    assert says in trained(folder, "task=own.Line", *WORDS, word, status=2)


@pytest.mark.slow
def test_what_is_read_is_taken(folder: Path) -> None:
    """All that the task, its optimiser and its schedule read, in a word or in a file, trains: also what they would read
    only after the warm-up, which here is longer than the run, and what the task has declared to read late."""
    (folder / "mine.yaml").write_text("task: own.Late\nargs: {width: 2}\noptim: {name: adamw, warmup_steps: 99}\n")
    words = (*WORDS, "optim.weight_decay=0.1", "optim.schedule=wsd", "optim.decay_share=0.3", "model.name=mine")
    assert "report run" in trained(folder, "--config", "mine.yaml", *words, status=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "says", "status"),
    [
        ("OneSet", "datasets() must return the training set and the validation set, not 1 of them", 2),
        ("NoConfig", "its constructor must take the configuration alone: def __init__(self, config)", 2),
        ("Bias", "args.bias: args is a dict: write args['bias'], or self.args.NAME", 1),
    ],
)
def test_a_task_that_is_not_quite_one(task: str, says: str, status: int, folder: Path) -> None:
    """One line instead of a traceback through the loop."""
    command = [forked_python(), str(PROJECT / "launch.py"), "--local", f"task=own.{task}", *WORDS]
    said, errors = end(begin(folder, command), status)
    assert says in said + errors


@pytest.mark.slow
def test_an_error_in_the_validation_comes_at_once(folder: Path) -> None:
    """Not after an epoch of hours, and then again after each restart."""
    command = [forked_python(), str(PROJECT / "launch.py"), "--local", "task=own.FailsInValidation", *WORDS]
    said, errors = end(begin(folder, command), 1)
    assert "KeyError: 'accuracy'" in said + errors
    assert "step 1/" not in said + errors


def test_declared(
    folder: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Task that declares what it reads is checked as it is submitted, before a place in the queue: the project that
    `init` writes does."""
    assert main(["init", str(folder / "project")]) == 0
    monkeypatch.chdir(folder / "project")
    monkeypatch.syspath_prepend(folder / "project")
    capfd.readouterr()
    sweep = ["sweep", "--name", "nets", "model.name=resnet18,resnet50"]
    assert "model.name: task=digits.Digits does not read it" in refusal(sweep, capfd, folder)
    assert "data.name: task=digits.Digits does not read it" in refusal(["data.name=mnits"], capfd, folder)
    (folder / "project" / "configs" / "mine.yaml").write_text("task: digits.Digits\nmodel: {name: resnet18}\n")
    assert "model.name: task=digits.Digits" in refusal(["--config", "mine"], capfd, folder)


def test_declared_settings(
    here: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`settings` is the dataclass of args: a wrong name and a missing value are refused as the run is submitted."""
    source = "from dataclasses import dataclass\n@dataclass\nclass Args:\n    width: int\n    depth: int = 2\n"
    (here / "own.py").write_text(f"{source}class Net(Task):\n    settings = Args\n    reads = ('model.name',)\n")
    monkeypatch.syspath_prepend(here)
    task = ["task=own.Net", "args.width=4"]
    assert "args.widht: task=own.Net does not read it" in refusal([*task, "args.widht=4"], capfd, here)
    assert "args.width: not set, and the dataclass of args has no default" in refusal(task[:1], capfd, here)
    assert main([*task, "model.name=mine", "--dry-run"]) == 0

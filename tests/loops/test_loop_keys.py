"""A key that a custom loop does not read is refused: by what it declares, as it is typed; else after its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from laststep import Run
from laststep.cli.main import main
from laststep.code.task_check import check_keys
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.plan import write_given
from laststep.rundir import RunDir
from tests.support.commands import begin, end, refusal
from tests.support.forked import forked_python
from tests.support.loops import run_function
from tests.support.project import PROJECT

ARGS = "@dataclass\nclass Args:\n    width: int\n    lr: float = 0.1\n"


def check(folder: Path, source: str, *words: str) -> None:
    """Check these words for a module with this source."""
    (folder / "loop.py").write_text(source)
    given = [word for word in words if word != "args.width=0..3"]  # of a sweep
    keys = [word.partition("=")[0] for word in words]
    check_keys(Config.load(None, ["task=loop.main", *given]), keys, search=[folder])


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def main(run): ...", "optim.lr=0.2"),
        ("def main(run): ...", "args.lr=3"),
        ("def main(run): ...\nmain.reads = ('optim',)", "optim.lr=0.2"),
        ("def main(run): ...\nmain.reads = ['optim.lr']", "optim.lr=0.2"),
        ("def main(run): ...\nmain.reads = ('optim.lr',)", "args.lr=3"),
        ("def main(run): ...\nmain.reads = KEYS", "model.name=mine"),
        ("def main(run): ...\nother.reads = ('optim.lr',)", "model.name=mine"),
        ("def main(run): ...\nmain.reads = ()", "checkpoint.every_steps=5"),
        ("def main(run): ...\nmain.reads = ()", "train.precision=fp32"),
        ("def main(run): ...\nmain.reads = ()", "train.shares=2"),
        ("from elsewhere import main", "checkpoint.replicas=1"),
        ("@decorated\ndef main(run): ...\nmain.reads = ()", "optim.lr=0.2"),
        ("from elsewhere import Args\ndef main(run, args: Args): ...", "args.lr=3"),
        (f"{ARGS}def main(run, args: Args): ...", "args.width=0..3"),
        (f"{ARGS}def main(run, other: Args): ...", "args.x=3"),
    ],
)
def test_accepted(source: str, word: str, tmp_path: Path) -> None:
    """What is declared, what Laststep reads by itself, and what only the rank can know."""
    check(tmp_path, source, word)


@pytest.mark.parametrize(
    ("source", "word", "message"),
    [
        (
            "def main(run): ...\nmain.reads = ('optim.lr',)",
            "optim.name=sgd",
            "task=loop.main does not read it",
        ),
        ("def main(run): ...\nmain.reads = ('train.epochs',)", "train.epoch_samples=9", "did you mean epochs?"),
        ("def main(run): ...\nmain.reads = ()", "train.precision=bf16", "train.precision: task=loop.main does not"),
        (f"{ARGS}def main(run, args: Args): ...", "args.n=3", "of args it reads lr, width: choose from lr, width"),
        (f"{ARGS}def main(run, args: 'Args'): ...", "args.lr=3", "args.width: not set, and the dataclass of args has"),
    ],
)
def test_not_declared(source: str, word: str, message: str, tmp_path: Path) -> None:
    """The experiment that somebody meant to make would not be the one that is made: nobody waits in a queue to learn
    it."""
    with pytest.raises(ConfigError) as error:
        check(tmp_path, source, word)
    assert message in str(error.value)


def test_every_start(
    here: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Words and the user's own file are checked; what a file that ships with Laststep sets for its task is not."""
    monkeypatch.syspath_prepend(here)
    (here / "own_loop.py").write_text("def main(run): ...\nmain.reads = ('train.epochs',)\n")
    (here / "own.yaml").write_text("task: own_loop.main\noptim: {momentum: 0.5}\n")
    task = "task=own_loop.main"
    assert "optim.lr: task=own_loop.main does not" in refusal([task, "optim.lr=0.2"], capfd, here)
    assert "optim.momentum: task=own_loop.main" in refusal(["--config", "own.yaml"], capfd, here)
    sweep = ["sweep", "--name", "scan", task]
    assert "optim.lr: task=own_loop.main does not read it" in refusal([*sweep, "optim.lr=1,2"], capfd, here)
    assert not (here / "runs").exists(), "nothing is submitted"

    (here / "says_nothing.py").write_text("def main(run): ...\n")
    assert main(["task=says_nothing.main", "seed=2", "optim.lr=0.2", "args.width=3"]) == 0
    said = capfd.readouterr().err
    late = "optim.lr, args.width: whether task=says_nothing.main reads it is checked in its first step"
    assert said.startswith(f"[laststep] {late}\n"), "a typing error is found once the job runs"

    assert main([*sweep, "args.lr=0.1,0.2"]) == 0
    assert "first step" not in capfd.readouterr().err, "it has declared what it reads"
    written = here / "runs/scan-lr_0.2/config.yaml"
    assert Config.load(written).args == {"lr": 0.2}
    assert main(["--config", str(written), "launch.name=again"]) == 0, "a run's file has every key"
    assert main(["--config", "mnist", "--name", "first", task, "train.epochs=3", "--nodes", "3"]) == 0
    (slurm / "squeue").write_text("#!/bin/sh\n")
    assert main(["resume", "first", "train.epochs=20"]) == 0
    assert Config.load(RunDir(here / "runs/first").config).train.epochs == 20


@pytest.mark.parametrize("words", [("checkpoint.replicas=1",), ("checkpoint.replicas=1", "train.sharding=hybrid")])
def test_copies_without_shards(words: tuple[str, ...], tmp_path: Path) -> None:
    """Of a Task it is known at the submission that its ranks hold the same: nobody waits in the queue to learn it."""
    for check_words in (lambda: check(tmp_path, "class main(Task): ...", *words), lambda: of_a_ready_made(words)):
        with pytest.raises(ConfigError, match=r"^checkpoint.replicas=1: copies need train.sharding=full, not train.sh"):
            check_words()


def of_a_ready_made(words: tuple[str, ...]) -> None:
    check_keys(Config.load(None, words), [word.partition("=")[0] for word in words])


def looping(
    before: Callable[[Run], Any] | None = None,
    within: Callable[[Run], Any] | None = None,
    after: Callable[[Run], Any] | None = None,
) -> Callable[[Run], None]:
    """A loop that does this before its steps, in each, and after each epoch's."""

    def loop(run: Run) -> None:
        if before:
            before(run)
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        run.restore(model=model, optimizer=optimizer)
        loader = run.loader(TensorDataset(torch.ones(8, 1)), 4)
        for _ in run.epochs(2):
            for (x,) in run.steps(loader):
                if within:
                    within(run)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if after:
                after(run)

    return loop


def train(loop: Callable[..., None], root: Path, *words: str) -> None:
    """Train it, with these words as the user's own."""
    run = RunDir(root / "run")
    run.path.mkdir()
    write_given(run.given, [word.partition("=")[0] for word in words])
    run_function(loop, root, "run", *words)


@pytest.mark.parametrize(
    ("loop", "word"),
    [
        (looping(lambda run: run.config.optim.lr), "optim.lr=0.2"),
        (looping(within=lambda run: run.config.optim.lr), "optim.lr=0.2"),
        (looping(lambda run: run.config.model.args["width"]), "model.args.width=3"),
        (looping(lambda run: vars(run.args)), "args.lr=3"),
        (looping(lambda run: getattr(run.args, "lr", 1)), "args.lr=3"),
        (looping(lambda run: run.config.args["lr"]), "args.lr=3"),
        (looping(lambda run: vars(run.config)), "optim.lr=0.2"),
        (looping(), "train.precision=fp32"),
        (looping(), "checkpoint.every_steps=5"),
    ],
)
def test_read(loop: Callable[..., None], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However the code comes to the key: nothing is concluded from its source."""
    train(loop, tmp_path, word)
    assert "does not read" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loop", "word", "message"),
    [
        (looping(), "optim.lr=0.2", "does not read it, so it would change nothing"),
        (looping(lambda run: run.config.optim.name), "optim.lr=0.2", "of optim it reads name"),
        (
            looping(lambda run: run.args, lambda run: getattr(run.args, "width", 1)),
            "args.widht=3",
            "did you mean width?",
        ),
        (looping(after=lambda run: run.config.optim.lr), "optim.lr=0.2", "name it in the task's `reads` if it is read"),
    ],
)
def test_not_read(loop: Callable[..., None], word: str, message: str, tmp_path: Path) -> None:
    """After the first step: the run would be labelled with a value that has changed nothing."""
    with pytest.raises(ConfigError) as error:
        train(loop, tmp_path, word)
    assert message in str(error.value)
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*")), "the run has not begun"


def test_an_end_that_is_not_read(tmp_path: Path) -> None:
    """`resume RUN train.epochs=9` on a loop of a fixed length would train nothing, and say that it is done."""
    train(looping(), tmp_path)
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(ConfigError, match=r"^train.epochs: .* does not read it, so it would change nothing"):
        run_function(looping(), tmp_path, "run", "train.epochs=9")
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == saved
    run_function(looping(), tmp_path, "run")


def test_read_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the first epoch, what was declared or is one's own is worth a warning only, and is right to be late."""
    loop: Any = looping(after=lambda run: run.config.optim.lr)
    loop.reads = ("optim.lr", "optim.momentum")
    train(loop, tmp_path, "optim.lr=0.2", "optim.momentum=0.5", "args.export_to=here")
    said = [line for line in capsys.readouterr().out.splitlines() if "has not read it" in line]
    assert [line.partition("WARNING: ")[2].partition(":")[0] for line in said] == ["optim.momentum", "args.export_to"]


@dataclass
class Settings:
    """args of `typed`."""

    width: int = 4
    depth: int = 2


def typed(run: Run, args: Settings) -> None:
    """Reads one of its args."""
    looping(lambda run: args.width)(run)


def test_a_dataclass_that_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is declared and then not read is a warning."""
    train(typed, tmp_path, "args.width=3", "args.depth=4")
    said = capsys.readouterr().out
    assert "WARNING: args.depth: task=" in said and "args.width:" not in said


MODULE = """\
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


class Data(Dataset):
    def __init__(self, args):
        self.args = args

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(1) * getattr(self.args, "scale", 1)


def main(run):
    loader = run.loader(Data(run.args), 4, num_workers=1)
    if run.rank == 0:
        print(run.config.model.name)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for x in run.steps(loader):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "says", "status"),
    [
        ("optim.lr=0.2", "optim.lr: task=own.main does not read it, so it would change nothing", 2),
        ("model.name=mine", "report run", 0),  # which rank 0 alone reads
        ("args.scale=2", "report run", 0),  # which only the loader's workers read
    ],
)
def test_on_two_ranks(word: str, says: str, status: int, tmp_path: Path) -> None:
    """All ranks end in one line, before anything is kept: the name is free for the run that was meant."""
    (tmp_path / "own.py").write_text(MODULE)
    words = ("task=own.main", "device=cpu", "launch.tasks_per_node=2", word)
    command = [forked_python(), str(PROJECT / "launch.py"), "--local", "--name", "run", *words]
    said, errors = end(begin(tmp_path, command), status)
    assert says in (said + errors).strip().splitlines()[-1]
    assert "has not read it" not in said + errors
    assert (tmp_path / "runs" / "run").exists() == (status == 0)

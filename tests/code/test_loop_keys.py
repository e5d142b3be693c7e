"""A key that a custom loop does not read is refused when it is typed: it would change nothing, silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.cli.main import main
from laststep.code.task_check import check_keys
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from tests.support.commands import refusal

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
        ("def main(run): run.epochs(run.config.train.epochs)", "train.epochs=3"),
        ("def main(run): SGD(lr=run.config.optim.lr)", "optim.lr=0.2"),
        ("def main(run):\n    cfg = run.config\n    more = cfg\n    print(more.optim.lr)", "optim.lr=0.2"),
        ("def main(run):\n    optim = run.config.optim\n    print(optim.lr)", "optim.lr=0.2"),
        ("def main(run): print(run.config.model.args['width'])", "model.args.width=3"),
        ("def main(run): Net(**run.config.model.args)", "model.args.width=3"),
        ("def main(run): build(run.config)", "optim.lr=0.2"),
        ("def main(run): elsewhere.train(run)", "optim.lr=0.2"),
        ("def main(r): train(net=r)", "optim.lr=0.2"),
        ("def main(run): Loop(run).fit()\nclass Loop(Base): ...", "optim.lr=0.2"),
        ("def main(run): Loop([run]).fit()\nclass Loop: ...", "optim.lr=0.2"),
        ("def main(run): train(run)\ndef train(this): print(this.config.optim.lr)", "optim.lr=0.2"),
        ("@decorated\ndef main(run): ...", "optim.lr=0.2"),
        ("from elsewhere import main", "optim.lr=0.2"),
        ("main = partial(other, 3)", "optim.lr=0.2"),
        ("class main(Task): ...", "optim.lr=0.2"),
        ("def main(run): ...", "seed=3"),
        ("def main(run): ...", "checkpoint.every_steps=5"),
        ("def main(run): ...", "launch.nodes=3"),
        ("def main(run): ...", "checkpoint.replicas=1"),
        ("from elsewhere import main", "checkpoint.replicas=1"),
        ("def main(run): ...", "train.log_every=1"),
        ("def main(run): ...", "train.precision=tf32"),
        ("def main(run): print(run.args.lr)", "args.lr=3"),
        ("def main(run): print(vars(run.args))", "args.lr=3"),
        ("def main(run): print(run.config.args['lr'])", "args.lr=3"),
        ("def main(run, args): print(args.lr)", "args.lr=3"),
        ("def main(run, args): build(args)", "args.lr=3"),
        ("from elsewhere import Args\ndef main(run, args: Args): ...", "args.lr=3"),
        (f"{ARGS}def main(run, args: Args): ...", "args.width=0..3"),
    ],
)
def test_read(source: str, word: str, tmp_path: Path) -> None:
    """What the loop reads, what Laststep reads for it, and what cannot be known."""
    check(tmp_path, source, word)


@pytest.mark.parametrize(
    ("source", "word", "message"),
    [
        ("def main(run): torch.optim.SGD()", "optim.lr=0.2", "loop.main, a custom loop, does not read it"),
        ("def main(run): print(run.config.train.epochs)", "train.max_steps=9", "loop.main, a custom loop, does not"),
        (
            "def main(run): train(run)\ndef train(run): ...",
            "train.batch_size=63",
            "let it read run.config.train.ba",
        ),
        ("def main(run): ...", "train.precision=bf16", "or run.args.precision and set args.precision"),
        ("def main(run): print(run.args.lr)", "args.rl=3", "loop.main does not read it; did you mean lr?"),
        ("def main(run, args): args.lr", "args.x=3", "loop.main does not read it; choose from lr"),
        (
            f"{ARGS}def main(run, args: Args): ...",
            "args.n=3",
            "loop.main does not read it; choose from lr, width",
        ),
        (f"{ARGS}def main(run, args: 'Args'): ...", "args.lr=3", "args.width: not set, and the dataclass of args has"),
    ],
)
def test_ignored(source: str, word: str, message: str, tmp_path: Path) -> None:
    """The experiment that somebody meant to make would not be the one that is made."""
    with pytest.raises(ConfigError) as error:
        check(tmp_path, source, word)
    assert message in str(error.value)


def test_every_start(
    here: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Words and the user's own file are checked; what a file that ships with Laststep sets for its task is not. A
    finished run can be extended by a key that its loop reads."""
    monkeypatch.syspath_prepend(here)
    (here / "own_loop.py").write_text("def main(run): print(run.config.train.epochs, run.args.lr)\n")
    (here / "own.yaml").write_text("task: own_loop.main\noptim: {momentum: 0.5}\n")
    task = "task=own_loop.main"
    assert "optim.lr: own_loop.main, a custom loop, does not" in refusal([task, "optim.lr=0.2"], capfd, here)
    assert "optim.momentum: own_loop.main" in refusal(["--config", "own.yaml"], capfd, here)
    sweep = ["sweep", "--name", "scan", task]
    assert "args.rl: own_loop.main does not read it" in refusal([*sweep, "args.rl=1,2"], capfd, here)
    assert not (here / "runs").exists(), "nothing is submitted"

    assert main([*sweep, "args.lr=0.1,0.2"]) == 0
    written = here / "runs/scan-lr_0.2/config.yaml"
    assert Config.load(written).args == {"lr": 0.2}
    assert main(["--config", str(written), "launch.name=again"]) == 0, "a run's file has every key"
    assert main(["--config", "mnist", "--name", "first", task, "train.epochs=3", "--nodes", "3"]) == 0
    (here / "fixed_loop.py").write_text("def main(run): run.epochs(5)")
    assert main(["--name", "fixed", "task=fixed_loop.main"]) == 0
    (slurm / "squeue").write_text("#!/bin/sh\n")
    capfd.readouterr()
    assert "train.epochs: fixed_loop.main" in refusal(["resume", "fixed", "train.epochs=20"], capfd, here)
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

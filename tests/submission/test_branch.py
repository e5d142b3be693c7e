"""`submit --from RUN`: a new run that begins with everything that another run has at its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.submission import branch
from tests.support.commands import REFUSING_SBATCH, refusal
from tests.support.ranks import fingerprint, reasons, train
from tests.support.runs import EVERYTHING, config, undisturbed_run

OPTIONS = (*EVERYTHING, "optim.schedule=constant")


def test_the_whole_state(root: Path) -> None:
    """The branch goes on where the run ended, here within an epoch: it equals a run that was never cut. Its own
    metrics are whole, and the first run stays as it is."""
    source = train(config(root, "source", 1, (*OPTIONS, "train.max_steps=10")))
    before = fingerprint(source)
    longer = branch.configure(source, ["train.max_steps=null", "launch.name=branch", f"launch.root={root}"])
    with run_folders.created(longer) as run:
        assert branch.copy_state(source, run) == 10
    assert fingerprint(train(longer)) == undisturbed_run(config(root, "any", 1, OPTIONS))
    assert reasons(run) == ["finished"]
    assert fingerprint(source) == before


def test_another_learning_rate(root: Path) -> None:
    """What may change does: the rate in the checkpoint's optimiser must not win. Its step may be named: what only the
    owner may read is taken along all the same."""
    source = train(config(root, "fast", 1, (*OPTIONS, "optim.warmup_steps=0", "train.epochs=1")))
    words = ["train.epochs=2", "optim.lr=0.0005", "launch.name=slow", f"launch.root={root}"]
    slower = branch.configure(source, words)
    source.secrets.write_text('{"alert.to": ["https://example.org"]}')
    with run_folders.created(slower) as run:
        assert branch.copy_state(source, run, 7) == 7
    assert run.secrets.read_text() == source.secrets.read_text()
    train(slower)
    assert [line["lr"] for line in read_lines(run.metrics) if "lr" in line] == [0.001] * 7 + [0.0005] * 7


def test_refused(root: Path) -> None:
    """A state of another shape could not be loaded, a run at its end would train nothing."""
    source = train(config(root, "done", 1, ("train.max_steps=2",)))
    for word in ("optim.name=adamw", "train.batch_size=16", "model.args.width=9", "seed=1", "train.ema_decay=0.5"):
        with pytest.raises(ConfigError, match=f"{word}: --from done takes over its state, .*model.weights="):
            branch.configure(source, [word])
    with pytest.raises(ConfigError, match=r"--from done: done ends at step 2, and .*; give e\.g\. train\.max_steps=4"):
        branch.configure(source, [])


def test_the_command(slurm: Path, here: Path, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It submits a run like any other; a run without a checkpoint, and a configuration from elsewhere, are refused."""
    source = train(config(root, "first", 1, ("train.max_steps=2", "task=classification")))
    words = ["--from", str(source.path), "train.max_steps=3", "launch.root=runs"]
    assert main([*words, "--name", "second"]) == 0
    said = capfd.readouterr().out
    assert "from   first, step 2" in said and "run    second" in said
    run = RunDir(here / "runs" / "second")
    assert Config.load(run.config).train.max_steps == 3
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 2]
    (slurm / "sbatch").write_text(REFUSING_SBATCH)
    assert "Slurm refused the job" in refusal_after_copy([*words, "--name", "third"], capfd)
    assert not (here / "runs" / "third").exists()
    assert "--site x: --from" in refusal([*words, "--site", "x"], capfd, here)
    (run.path / "checkpoints").rename(here / "elsewhere")
    assert "--from second: this run has no checkpoint yet" in refusal(["--from", "second"], capfd, here)


def refusal_after_copy(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The error of a command that is refused late."""
    assert main(words) == 2
    return capfd.readouterr().err

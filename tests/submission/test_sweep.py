"""A sweep: which runs it makes, what they are called, and that nothing is submitted twice or by mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from laststep.cli.main import main
from laststep.config.config import Config, variants
from laststep.config.errors import ConfigError
from laststep.records.metrics import read_lines
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.script import as_override
from laststep.submission.sweep import combinations, name_of
from tests.support.commands import fake_squeue, refusal
from tests.support.records import ended_attempt


def test_combinations() -> None:
    """Each value of one key with each value of the other; a comma in brackets or quotes separates nothing."""
    found = combinations(["optim.lr=0.1,0.03", "seed=0..2"])
    assert [(change["optim.lr"], change["seed"]) for change in found] == [
        (lr, seed) for lr in (0.1, 0.03) for seed in (0, 1, 2)
    ]
    assert combinations(["seed=-1..1,7"]) == [{"seed": seed} for seed in (-1, 0, 1, 7)]
    assert combinations(["launch.setup=[a,b],[c]"]) == [{"launch.setup": ["a", "b"]}, {"launch.setup": ["c"]}]
    assert combinations(["data.root='a,b',c"]) == [{"data.root": "a,b"}, {"data.root": "c"}]


@pytest.mark.parametrize(
    ("word", "said"),
    [("seed=1,,2", "seed=1,,2: a value is missing"), ("seed=4..0", "4..0 is empty"), ("seed=0..5000", "at most 1000")],
)
def test_no_combinations(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        combinations([word])


def test_marked_words_of_a_script() -> None:
    """Only what is marked varies: `--betas 0.9,0.95` is one argument, and `@args.txt` a file of arguments."""
    script = ["train.py", "--lr", "@1e-3,3e-4", "--betas", "0.9,0.95", "@args.txt", "model.depth=@2..3", "--x=@a,b"]
    found = combinations(["seed=1,2"], script)
    assert len(found) == 16
    assert found[-1] == {"seed": 2, "lr": "3e-4", "model.depth": "3", "x": "b"}
    assert name_of("scan", found[-1].typed) == "scan-seed_2-lr_3e-4-depth_3-x_b"
    words = ["train.py", "--lr", "3e-4", "--betas", "0.9,0.95", "@args.txt", "model.depth=3", "--x=b"]
    assert found[-1].settings(script) == {"seed": 2, "script": words}
    with pytest.raises(ConfigError, match=r"^seed: two of what varies go by this name"):
        combinations(["seed=1,2"], ["train.py", "--seed", "@3,4"])


def test_awkward_words_of_a_script_stay() -> None:
    """YAML and OmegaConf would take them for something else."""
    awkward = ["train.py", "yes", "${HOME}", "[1,2]", "it's", "\\", "é: x # y", "", "--lr", "@1,2"]
    config = Config.load(None, [as_override(awkward)])
    changes = [change.settings(config.script) for change in combinations([], awkward)]
    for (varied, text), lr in zip(variants(config, changes), ("1", "2")):
        assert varied.script == [*awkward[:-1], lr]
        assert Config.parse(text).script == varied.script


def test_names() -> None:
    """Readable, valid as a folder's name, and distinct when two keys end alike."""
    assert name_of("scan", {"optim.lr": 0.1, "seed": 3}) == "scan-lr_0.1-seed_3"
    assert [name_of("s", change.typed) for change in combinations(["optim.lr=1e9,0.10"])] == ["s-lr_1e9", "s-lr_0.10"]
    assert name_of("scan", {"model.name": "vit b/16", "optim.name": "sgd"}) == "scan-model.name_vit_b_16-optim.name_sgd"


def test_variants_are_what_loading_gives() -> None:
    """The fast path for a thousand runs gives the same configurations."""
    base = Config.load("mnist", ["launch.setup=['echo \\${HOME}']"])
    changes = [{"optim.lr": lr, "model.args.width": width} for lr in (0.5, 1) for width in (8, 16)]
    for change, (config, text) in zip(changes, variants(base, changes)):
        words = ["launch.setup=['echo \\${HOME}']", *(f"{key}={value}" for key, value in change.items())]
        assert config == Config.load("mnist", words)
        assert text == config.to_yaml()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lr=0.1"], "nothing varies"),
        (["seed=1,x"], "seed=x: must be of type int"),
        (["optim.lr=0.1,-1"], "optim.lr=-1.0: must be at least 0"),
        (["launch.nodes=1,2"], "launch.* cannot vary"),
        (["seed=0..1000"], "seed=0..1000: 1001 combinations: a sweep has at most 1000"),
        (["seed=0..999999999"], "1000000000 combinations"),
        (["seed=0..99", "optim.lr=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0,1.1"], "1100 combinations"),
        (["seed=1,1"], "two combinations would have this name"),
        (["optim.lr=0.1,0.10"], "-lr_0.10: has the values of "),
        (["seed=1,2", "--local", "--parallel", "2"], "--parallel 2: with --local one run follows another"),
        (["sed=1,2"], "sed: no such key; did you mean seed?"),
        (["seed=1,2", "--parallel", "0"], "--parallel 0: must be at least 1"),
    ],
)
def test_refused(words: list[str], said: str, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing is created: half a sweep is worse than none."""
    assert said in refusal(["sweep", *words], capfd, here)


def test_submitted_as_one_array(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One sbatch; each run has its own configuration and shares logs and code with the others."""
    options = ("--parallel", "2", "--nodes", "1-2")
    assert main(["sweep", "--name", "scan", *options, "optim.lr=0.1,0.03", "seed=0..1", "train.epochs=3"]) == 0
    out, err = capfd.readouterr()
    assert "sweep  scan: 4 runs" in out and "job    4711: 4 runs, 2 at a time" in out and err == ""
    script = (slurm / "submitted.sh").read_text()
    assert "#SBATCH --array=0-3%2\n" in script and "#SBATCH --nodes=1-2\n" in script
    runs = [RunDir(here / "runs" / f"scan-lr_{lr}-seed_{seed}") for lr in (0.1, 0.03) for seed in (0, 1)]
    for number, run in enumerate(runs):
        config = Config.load(run.config)
        assert (config.launch.name, config.train.epochs) == (run.name, 3)
        assert f"lr_{config.optim.lr}-seed_{config.seed}" in run.name
        assert read_submissions(run.submissions)[0]["job_id"] == f"4711_{number}"
        assert (run.logs / f"4711_{number}_submitted.pkl").exists() and (run.code / "launch.py").exists()
    assert [line["run"] for line in read_lines(RunDir(here / "runs" / "scan").sweep)] == [run.name for run in runs]


def test_again_only_what_is_missing(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs that finished or are in the queue are left alone; those that ended early and new ones form one array."""
    assert main(["sweep", "--name", "scan", "seed=0..2"]) == 0
    finished = RunDir(here / "runs" / "scan-seed_0")
    finished.attempts.write_text(json.dumps(ended_attempt(job_id="4711_0")) + "\n")
    (slurm / "squeue").write_text(fake_squeue("4711_1"))
    for name in ("scan-seed_2", "scan-seed_0"):
        said = RunDir(here / "runs" / name).submissions
        said.write_text(said.read_text().replace('"time": 1', '"time": 0'))  # long ago
    capfd.readouterr()
    assert main(["sweep", "--name", "scan", "seed=0..3"]) == 0
    assert "sweep  scan: 4 runs\njob    4711: 2 runs, scan-seed_2 to scan-seed_3" in capfd.readouterr().out
    assert main(["sweep", "--name", "scan", "seed=0..1"]) == 0
    assert "all of them have finished or are in the queue" in capfd.readouterr().out
    assert main(["sweep", "--name", "scan", "seed=0..3", "optim.lr=7"]) == 2
    assert "scan-seed_0: this run exists with another configuration" in capfd.readouterr().err


def test_status_ranks_a_sweep(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The best run comes first (lowest loss, highest accuracy), runs without a validation last."""
    assert main(["sweep", "--name", "scan", "seed=0..2"]) == 0
    for seed, (loss, accuracy) in {1: (0.5, 0.7), 2: (0.3, 0.6)}.items():
        line = {"epoch": 1, "step": 5, "train_loss": 1.0, "val_loss": loss, "val_accuracy": accuracy}
        RunDir(here / "runs" / f"scan-seed_{seed}").metrics.write_text(json.dumps(line) + "\n")
    capfd.readouterr()
    for words, order in (([], [2, 1, 0]), (["--by", "val_accuracy"], [1, 2, 0])):
        assert main(["status", "--sweep", "scan", *words]) == 0
        _, *rows, _ = capfd.readouterr().out.splitlines()
        assert [row.split()[0] for row in rows] == [f"scan-seed_{seed}" for seed in order]
    assert main(["status", "--sweep", "scna"]) == 2
    assert "--sweep scna: no such sweep in" in capfd.readouterr().err
    assert os.listdir(here / "runs" / "scan")


def test_resume_a_sweep(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Those of its runs that ended early are continued, each in a new job; patterns and names select other runs."""
    assert main(["sweep", "--name", "scan", "seed=0..2"]) == 0
    for seed, reason in ((0, "finished"), (1, "timeout")):
        record = ended_attempt(job_id=f"4711_{seed}", reason=reason)
        RunDir(here / "runs" / f"scan-seed_{seed}").attempts.write_text(json.dumps(record) + "\n")
    (slurm / "squeue").write_text(fake_squeue("4711_2"))
    capfd.readouterr()
    assert main(["resume", "--sweep", "scan", "launch.time_min=9"]) == 0
    out = capfd.readouterr().out
    assert "scan-seed_0: finished, so there is nothing to resume" in out and "scan-seed_2: starting, so" in out
    assert out.count("run    ") == 1 and "run    scan-seed_1" in out
    assert "scan-seed_3" in refusal(["cancel", "scan-seed_3"], capfd, here)
    assert "nothing-*: matches no run in runs/" in refusal(["report", "nothing-*"], capfd, here)
    assert "name a sweep or runs, not both" in refusal(["cancel", "scan-seed_1", "--sweep", "scan"], capfd, here)
    assert "--sweep scna: no such sweep in runs/" in refusal(["cancel", "--sweep", "scna"], capfd, here)
    assert "name the run, or its folder" in refusal(["resume"], capfd, here)

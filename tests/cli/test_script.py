"""A script stays a script: `launch.py --nodes 2 train.py --lr 3e-4`, `python train.py`, torchrun, `-m package`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from laststep import script
from laststep.cli import main as main_module
from laststep.config.config import Config
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support import commands
from tests.support.commands import begin, end, refusal
from tests.support.forked import forked_python
from tests.support.project import PROJECT, wait_until
from tests.support.ranks import fingerprint, reasons

TRAIN = PROJECT / "tests" / "cli" / "user_scripts" / "train.py"
LAUNCH = (sys.executable, str(PROJECT / "launch.py"))
CPU = ("device=cpu", "launch.hang_timeout_s=60")
NO_WORKER = {"WORKERS": "0"}  # one that the script spawns imports torch, for seconds


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a script in it."""
    shutil.copy(TRAIN, tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def types(folder: Path, *command: str, env: dict[str, str] | None = None, status: int = 0) -> str:
    """What a command says, with its errors. Its processes are forked, with torch loaded."""
    return commands.types(folder, *command, env=env, status=status, python=forked_python())


@pytest.mark.parametrize(
    ("words", "ours", "scripts"),
    [
        ("--nodes 2 train.py --lr 3e-4 seed=1", "--nodes 2", "train.py --lr 3e-4 seed=1"),
        ("seed=1 src/train.py --nodes 2", "seed=1", "src/train.py --nodes 2"),
        ("--local -m package.train -m x", "--local", "-m package.train -m x"),
        ("--local -- train.py a.py", "--local", "train.py a.py"),
        ("--local model.args.file=a.py", "--local model.args.file=a.py", ""),
        ("", "", ""),
    ],
)
def test_where_a_script_begins(words: str, ours: str, scripts: str) -> None:
    """All after it is its own, even what looks like an option of Laststep's: as with torchrun."""
    assert script.split(words.split()) == (ours.split(), scripts.split())


AWKWARD = ["train.py", "--lr=3e-4", "yes", "null", "1.10", "${HOME}", "a b", "", "[1,2]", "it's", "\\", "é: x # y"]


def test_words_arrive_as_they_were_typed() -> None:
    """YAML takes `yes` for a truth value and OmegaConf `${HOME}` for an interpolation: a script gets text."""
    config = Config.load(None, [script.as_override(AWKWARD)])
    assert (config.script, config.task) == (AWKWARD, "script")
    assert Config.parse(config.to_yaml()).script == AWKWARD, "as recorded in config.yaml"
    assert Config.load(None, ["script=train.py --lr 3e-4"]).script == ["train.py", "--lr", "3e-4"], "in a YAML file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nofile.py", "nofile.py: no such script in {folder}"),
        ("broken.py --x", "broken.py, line 1: '(' was never closed"),
        ("-m nowhere.train", "-m nowhere.train: no such module on the Python path ({folder}, ...)"),
        ("-m", "script=-m: name the module: -m package.module"),
        ("task=language train.py --lr 1", "script=train.py --lr 1: task=language would train too; leave one out"),
        ("task=script", "task=script: name the script and its words: script=[train.py,--lr,3e-4]"),
        ("train.sharding=full train.py", "train.sharding=full: script is a custom loop"),
    ],
)
def test_refused(words: str, said: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before anything is submitted, in one line."""
    (folder / "broken.py").write_text("import laststep; f(\n")
    assert refusal(["--local", *words.split()], capfd, folder).startswith(said.format(folder=folder))
    assert refusal(words.split(), capfd, folder).startswith(said.format(folder=folder)), "without an option before it"


def test_it_runs_where_it_was_typed(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """In a folder of a project, a script and the paths among its own words mean what they mean to torchrun there."""
    (folder / "configs").mkdir()
    (folder / "configs" / "default.yaml").write_text("seed: 1\n")
    (folder / "data").touch()
    (sub := folder / "deep").mkdir()
    monkeypatch.chdir(sub)
    words = ["../train.py", "--data", "../data"]
    assert main_module._in_project(["--local", *words]) == ["--local", *words]
    assert Path.cwd() == sub and capfd.readouterr().err == ""
    assert main_module._in_project(["resume", "first", "--", "--data", "../data"])[-3:] == ["--", "--data", "../data"]
    assert Path.cwd() == folder, "a run is found in the project"


@pytest.mark.slow
def test_by_python(folder: Path) -> None:
    """`python train.py` trains, and typed again it continues; with other words it is refused, since the run keeps its
    words. LASTSTEP_NEW=1 begins another run."""
    words = (sys.executable, "train.py", "--steps", "12")
    said = types(folder, *words, env={"DIE_IN": "8"}, status=-signal.SIGKILL)
    assert "argv ['train.py', '--steps', '12'] as __main__, rank 0 of 1" in said
    run = RunDir(folder / "runs" / "train")
    said = types(folder, *words)
    assert "ends once" in said, "trained on, although nothing was saved yet"
    assert reasons(run)[-1] == "finished"
    assert "nothing is left to do" in types(folder, *words)
    said = types(folder, sys.executable, "train.py", "--steps", "14", status=2)
    assert "\nerror: train.py --steps 14: train was started as `train.py --steps 12`, and a run keeps its words" in said
    types(folder, *words, env={"LASTSTEP_NEW": "1", **NO_WORKER})
    (other,) = set((folder / "runs").iterdir()) - {run.path}
    assert other.name.startswith("train-") and fingerprint(RunDir(other)) == fingerprint(run)


def undisturbed(folder: Path, *words: str) -> RunDir:
    """The run of two ranks that the script makes when nothing disturbs it."""
    start = (*LAUNCH, "--local", "--tasks-per-node", "2", "--name", "undisturbed", *CPU)
    types(folder, *start, "train.py", *words, env=NO_WORKER)
    return RunDir(folder / "runs" / "undisturbed")


@pytest.mark.slow
def test_stopped_and_killed(folder: Path) -> None:
    """On two ranks: a stop leaves the loop by a SystemExit, so `finally` is honoured, the code after the loop runs only
    once the training is done, and the weights are those of an undisturbed run."""
    words = ("train.py", "--steps", "40", "--lr", "0.02")
    start = (*LAUNCH, "--local", "--tasks-per-node", "2", "--name", "disturbed", *CPU, *words)
    said = types(folder, *start, env={"STOP_IN": "9"}, status=128 + signal.SIGTERM)
    assert said.count("leaves the loop") == 1 and "ends once" not in said and "Traceback" not in said
    run = RunDir(folder / "runs" / "disturbed")
    said = types(folder, *LAUNCH, "resume", "disturbed", "--local", env={"DIE_IN": "20"})
    assert "argv ['train.py', '--steps', '40', '--lr', '0.02']" in said, "resume uses the recorded words"
    (first, *_) = read_lines(run.attempts)
    assert f"{40 - first['end_step']} steps left of 40" in said, "a progress bar asks for the length"
    assert said.count("ends once") == 1
    assert [record["lost_steps"] for record in read_lines(run.attempts)] == [0, 0, 0]
    assert fingerprint(run) == fingerprint(undisturbed(folder, *words[1:]))


@pytest.mark.slow
def test_more_words_at_a_resume(folder: Path) -> None:
    """`resume RUN -- --steps 40` says what it changes, and a run that is made longer by its own words equals one that
    was that long from the beginning: each step and the epoch once in metrics.jsonl."""
    start = (*LAUNCH, "--local", "--tasks-per-node", "2", "--name", "longer", *CPU)
    types(folder, *start, "train.py", "--steps", "25", "--lr", "0.02", env=NO_WORKER)
    said = types(folder, *LAUNCH, "resume", "longer", "--local", "--", "--steps", "40", env=NO_WORKER)
    assert "script train.py --steps 25 --lr 0.02 --steps 40\n  was  train.py --steps 25 --lr 0.02\n" in said
    longer = RunDir(folder / "runs" / "longer")
    assert fingerprint(longer) == fingerprint(undisturbed(folder, "--steps", "40", "--lr", "0.02"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [("-m", "package.train"), ("package/train.py",)])
def test_other_starts(folder: Path, words: Sequence[str]) -> None:
    """torchrun starts it as any script; a script imports what lies beside it, a module what its package has."""
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    beside = "from package import beside" if "-m" in words else "import beside"
    (folder / "package" / "train.py").write_text(
        TRAIN.read_text().replace("import laststep\n", f"import laststep\n{beside}\n")
    )
    (folder / "package" / "beside.py").write_text("LR = 0.03\n")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    said = types(folder, *torchrun, *words, "--steps", "8", env={"LASTSTEP_SITE": str(site(folder))})
    assert said.count("as __main__, rank") == 2
    assert Config.parse(RunDir(folder / "runs" / "train").config.read_text()).script == [*words, "--steps", "8"]


def site(folder: Path) -> Path:
    """What a site sets for all runs."""
    path = folder / "site.yaml"
    path.write_text("device: cpu\n")
    return path


@pytest.mark.slow
def test_a_wrong_word_of_its_own(folder: Path) -> None:
    """argparse exits with status 2 in each rank, before the run is restored: nothing is tried again, and no folder is
    left that would block the name."""
    said = types(folder, *LAUNCH, "--local", "--name", "typo", *CPU, "train.py", "--stepps", "9", status=2)
    assert "unrecognized arguments: --stepps 9" in said
    assert said.endswith("error: train.py: ended with exit status 2 before run.restore(...)\n")
    assert not (folder / "runs" / "typo").exists()


@pytest.mark.slow
def test_it_ends_without_a_run(folder: Path) -> None:
    """Its exit is named, and so is the script: `task=script` is no word of the user's."""
    (folder / "early.py").write_text("import laststep, sys\nrun = laststep.run()\nsys.exit()\n")
    said = types(folder, *LAUNCH, "--local", "--name", "early", *CPU, "early.py", status=2)
    assert "\nerror: early.py: ended with exit status 0 before run.restore(...); write run.restore(model=" in said
    (folder / "early.py").write_text("import laststep\nrun = laststep.run()\n")
    said = types(folder, sys.executable, "early.py", status=2)
    assert "] config none, script early.py, runs in runs\n" in said, "the first line of every start"
    assert "\nerror: early.py: ended without run.restore(...); write run.restore(model=" in said


@pytest.mark.slow
def test_a_stop_that_is_caught(folder: Path) -> None:
    """A bare `except` swallows the SystemExit of a stop: it is raised again at the next call, and no step follows."""
    command = begin(folder, [sys.executable, "train.py", "--steps", "400", "--pause", "0.01", "--swallow"])
    run = RunDir(folder / "runs" / "train")
    wait_until(lambda: len(read_lines(run.metrics)) > 20, "the script did not train")
    command.send_signal(signal.SIGINT)
    said = "".join(end(command, 128 + signal.SIGINT))
    assert "swallowed" in said and "a step after the stop" not in said
    (record,) = read_lines(run.attempts)
    assert record["lost_steps"] == 0 and record["end_step"] < 400


@pytest.mark.slow
def test_prove(folder: Path) -> None:
    """The script's own words reach the runs that prove makes."""
    words = ("prove", "--json", "--steps", "6", "device=cpu", "train.py", "--steps", "30")
    said, _ = end(begin(folder, [*LAUNCH, *words]))
    assert json.loads(said)["verdict"] == "exact"

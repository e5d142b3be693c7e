"""The folder in which a run's ranks work: the one where its first command was typed, wherever it is resumed from."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from laststep import trainer as trainer_module
from laststep.attempt import start
from laststep.cli.main import main
from laststep.config.config import Config
from laststep.ranks.launchers import WORKING_FOLDER
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from tests.support.commands import refusal

TASK = "from laststep import Task\nclass Mine(Task): ...\n"


@pytest.fixture
def mine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a task, where commands are typed."""
    (here / "own_task.py").write_text(TASK)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return here


def submitted(slurm: Path) -> dict[str, str]:
    """What the job that was submitted last is given: its variables, and the folder of its shell."""
    script = (slurm / "submitted.sh").read_text()
    found = dict(re.findall(r'^export (\w+)="(.*)"$', script, re.M))
    return {**found, "chdir": "".join(re.findall(r"^#SBATCH --chdir=(.*)$", script, re.M))}


def test_relative_data_paths(mine: Path, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.root names the same folder for every attempt, also in a job that is resumed from elsewhere, whose ranks work
    in the folder where the run was submitted, as they import the code that was submitted there."""
    assert main(["--name", "first", "task=own_task.Mine", "data.root=numbers"]) == 0
    run = RunDir(mine / "runs" / "first")
    assert Config.load(run.config).data.root == str(mine / "numbers")
    assert submitted(slurm)[WORKING_FOLDER] == str(mine) and not submitted(slurm)["chdir"]
    before = submitted(slurm)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(mine)])
    (slurm / "squeue").write_text("#!/bin/sh\n")
    assert main(["resume", str(run.path)]) == 0
    assert submitted(slurm) == {**before, "chdir": str(mine)}
    assert Config.load(run.config).data.root == str(mine / "numbers")

    # Without the copy, the next resume copies the code that is in that folder now.
    shutil.rmtree(run.code)
    (mine / "own_task.py").write_text(TASK + "# edited\n")
    assert main(["resume", str(run.path)]) == 0
    assert (run.code / "own_task.py").read_text().endswith("# edited\n")
    assert [line["folder"] for line in read_submissions(run.submissions)] == [str(mine)] * 3


def test_a_submission_is_recorded(mine: Path, slurm: Path) -> None:
    """Which Laststep, which commit, from where: what a paper's appendix and a bug report ask for."""
    assert main(["--name", "first", "task=own_task.Mine"]) == 0
    (line,) = read_submissions(mine / "runs" / "first" / "submissions.jsonl")
    assert (line["folder"], line["commit"], line["version"]) == (str(mine), None, sys.modules["laststep"].__version__)


def test_a_place_for_data_that_is_no_folder(mine: Path, slurm: Path) -> None:
    """A task of the user's own may read from anywhere."""
    assert main(["--name", "first", "task=own_task.Mine", "data.root=s3://bucket/images"]) == 0
    assert Config.load(mine / "runs" / "first" / "config.yaml").data.root == "s3://bucket/images"


def test_a_rank_moves_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a node that lacks the folder, one line says what relative paths refer to."""
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.setenv(WORKING_FOLDER, str(tmp_path / "gone"))
    trainer_module._change_to_working_folder()
    assert Path.cwd() == tmp_path / "code"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(
        f"{tmp_path}/gone: No such file or directory on this node; relative paths refer to {tmp_path}/code instead"
    )
    monkeypatch.setenv(WORKING_FOLDER, str(tmp_path))
    trainer_module._change_to_working_folder()
    assert Path.cwd() == tmp_path and not capsys.readouterr().out


def test_code_that_is_not_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the reason, a job that runs code which may still be edited says so, and names the file."""
    run = RunDir(tmp_path / "run")
    for folder, name in ((run.code, "copied_task"), (tmp_path, "live_task")):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / f"{name}.py").write_text("")
        monkeypatch.syspath_prepend(folder)
        __import__(name)

    def said(name: str) -> list[str]:
        start.check_origin(f"{name}.Mine", name, run)
        return capsys.readouterr().out.splitlines()

    assert not said("live_task"), "ranks that another launcher starts run no copy"
    monkeypatch.setenv(WORKING_FOLDER, str(tmp_path))
    assert not said("copied_task")
    (line,) = said("live_task")
    assert f"task=live_task.Mine is imported from {tmp_path}/live_task.py, which is not in the copy" in line


MODULE = "from laststep import Task\nclass Lines(Task): ...\ndef main(run): ...\ndef helper(a, b): ...\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["task=mine"], "task=mine: is a module: name its Task class or function, e.g. mine.Lines or mine.main"),
        (["task=pack.mine"], "task=pack.mine: is a module: name its Task class or function, e.g. pack.mine.Lines"),
        (["task=pack"], "task=pack: is a module: name its Task class or function"),
        (["task=pack.nothing"], "task=pack.nothing: pack has no nothing; there is none to choose from"),
        (["task=mine.helper"], "task=mine.helper: must take the run, and perhaps args: def helper(run)"),
        (["task=__main__.Mine"], "task=__main__.Mine: the ranks cannot import a script or a notebook; move Mine to"),
    ],
)
def test_a_task_that_is_none(
    words: list[str], says: str, here: Path, slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A newcomer names the file instead of what is in it: the line says what could be meant."""
    for place in (here, here / "pack"):
        place.mkdir(exist_ok=True)
        (place / "mine.py").write_text(MODULE)
    (here / "pack" / "__init__.py").write_text("")
    assert says in refusal(words, capfd, here)

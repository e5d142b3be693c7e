"""init: a project that a newcomer writes with one command, and that trains before anything in it is edited."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from laststep.cli.init import FILES, TEMPLATE
from laststep.cli.main import main
from laststep.config.config import Config
from laststep.records.metrics import read_lines
from laststep.runs import run_folders
from laststep.say import command
from tests.support.commands import files, refusal
from tests.support.ranks import reasons, train


@pytest.mark.parametrize(
    ("words", "folder", "goes_there"),
    [
        ([], ".", ""),
        (["."], ".", ""),
        (["demo"], "demo", "next   cd demo\n"),
        (["lab/my-project 2"], "lab/my-project 2", "next   cd 'lab/my-project 2'\n"),
        (["~nobody-at-all"], "~nobody-at-all", "next   cd '~nobody-at-all'\n"),
    ],
    ids=["no folder", "here", "new folder", "not a Python name", "not a user"],
)
def test_writes_a_project(
    words: list[str], folder: str, goes_there: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything that is written is named, and what is printed as the next commands can be typed as it stands."""
    (here / "configs").unlink()
    assert main(["init", *words]) == 0
    wrote = "".join(f"wrote  {Path(folder) / name}\n" for name in FILES)
    assert capfd.readouterr() == (f"{wrote}{goes_there}next   {command('--local', bool(goes_there))}\n", "")
    assert [name for name in files(here / folder) if (here / folder / name).is_file()] == sorted(FILES)
    for name in FILES:
        copy = here / folder / name
        assert copy.read_bytes() == (TEMPLATE / name).read_bytes() and not copy.is_symlink()


def test_needs_no_option(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In its folder the command finds the project's configuration, task and site profile."""
    (here / "configs").unlink()
    assert main(["init"]) == 0
    capfd.readouterr()
    assert main(["--dry-run", "--nodes", "2", "--site", "configs/site/example.yaml"]) == 0
    said = capfd.readouterr().out
    assert "\ntask: digits.Digits\n" in said and "#SBATCH --nodes=2\n" in said


def test_a_misspelt_setting_of_its_own(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is refused as it is typed: a sweep of it would be the same run again and again."""
    (here / "configs").unlink()
    assert main(["init"]) == 0
    capfd.readouterr()
    for words in (["args.widht=64"], ["--local", "args.widht=64"], ["sweep", "args.widht=16,32"]):
        assert main(words) == 2
        assert "args.widht" in (said := capfd.readouterr().err) and "did you mean width?" in said
    assert not (here / "runs").exists()


def test_trains_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing in it must be edited first; after one epoch of ten it reads most digits. The run can be evaluated in any
    folder, since it is known in which one its code is."""
    folder = tmp_path / "demo"
    assert main(["init", str(folder)]) == 0
    words = [f"launch.root={folder}/runs", "launch.name=first", "device=cpu", "train.max_steps=63"]
    config = Config.load(folder / "configs" / "default.yaml", words, folder / "configs" / "site" / "example.yaml")
    run = train(config, before=partial(_work_in, folder))
    assert reasons(run) == ["finished"]
    assert read_lines(run.metrics)[-1]["val_accuracy"] > 0.8
    monkeypatch.chdir(folder)
    run_folders.record_submission(run, "local-1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    capfd.readouterr()
    assert main(["evaluate", "demo/runs/first"]) == 0
    assert "(as the run itself has measured)" in capfd.readouterr().out
    assert main(["evaluate", str(run.path), "data.root=/newer"]) == 2
    said, refused = capfd.readouterr()
    assert said == "" and "data.root: task=digits.Digits does not read it, so it would change nothing" in refused

    def fails(*_: object) -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(sys.modules["digits"].Digits, "step", fails)
    assert main(["evaluate", str(run.path)]) == 1
    said, failed = capfd.readouterr()
    assert failed.startswith("Traceback") and failed.endswith("ValueError: no luck\n")
    assert "/cli/evaluate.py" not in failed, "it begins at the user's own code"


def _work_in(folder: Path) -> None:
    os.chdir(folder)
    sys.path.append(str(folder))


def test_readme_says_what_there_is() -> None:
    """The project's README names its files and the two commands that train."""
    readme = (TEMPLATE / "README.md").read_text()
    named = set(re.findall(r"`([\w./]+\.(?:py|yaml))`", readme))
    assert named == {name for name in FILES if name.endswith((".py", ".yaml"))}
    assert re.findall(r"^    (.+)$", readme, re.MULTILINE) == ["laststep --local", "laststep --nodes 2 --site example"]


@pytest.mark.parametrize("name", FILES)
def test_keeps_what_is_there(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A README or a configuration of the user's own is worth more than ours; half a project would be no use."""
    mine = here / "demo" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert refusal(["init", "demo"], capfd, here) == f"demo/{name}: exists already; name another folder"
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("file", "file: is not a folder"),
        ("file/demo", "file/demo: cannot be written: Not a directory"),
        ("/proc/demo", "/proc/demo: cannot be written: No such file or directory"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
    ids=["a file", "below a file", "not writable", "too long"],
)
def test_wrong_folder(folder: str, says: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing is left behind."""
    (here / "file").write_text("")
    assert says in refusal(["init", folder], capfd, here)


def test_full_disk(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A project that could not be written whole leaves no file: the same command works once there is room."""
    (here / "demo" / "configs" / "site").mkdir(parents=True)
    monkeypatch.setattr("laststep.cli.init.FILES", (*FILES, "no such file"))
    assert "demo: cannot be written: No such file" in refusal(["init", "demo"], capfd, here)

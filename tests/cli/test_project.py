"""The project that a command is about: that of the folder where it is typed, or of the nearest one above it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laststep.cli.main import find_project, main
from laststep.say import command
from tests.support.commands import refusal


@pytest.fixture
def project(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A project as `init` writes it."""
    assert main(["init", str(tmp_path / "project")]) == 0
    capfd.readouterr()
    return tmp_path / "project"


def test_from_a_subfolder(
    project: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`cd src/deep && laststep` trains the project's task, not the built-in digits in a second runs/; it says where."""
    deep = project / "src" / "deep"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert main(["--dry-run", "--name", "sub"]) == 0
    said, noted = capfd.readouterr()
    assert "\ntask: digits.Digits\n" in said
    assert str(project / "runs") in said
    assert noted.startswith(f"[laststep] project {project}\n")
    assert Path.cwd() == project  # where the ranks work, and relative paths of the configuration lead


def test_paths_that_were_typed(
    project: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A path means what it means in the shell that completed it, though the command works in the project's folder."""
    deep = project / "src" / "deep"
    (deep / "digits").mkdir(parents=True)
    (deep / "mine.yaml").write_text("task: classification\ndata: {name: mnist}\nseed: 7\n")
    monkeypatch.chdir(deep)
    assert main(["--dry-run", "--config", "mine.yaml", "data.root=digits", "launch.root=../runs"]) == 0
    said = capfd.readouterr().out
    assert "\nseed: 7\n" in said
    assert f"\n  root: {deep / 'digits'}\n" in said
    assert f"\n  root: {project / 'src' / 'runs'}\n" in said


def test_a_run_is_found_from_a_subfolder(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A name is no path: a folder here that is called like a run does not hide the run."""
    (project / "src" / "first").mkdir(parents=True)
    run = project / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("launch: {name: first}\n")
    monkeypatch.chdir(project / "src")
    assert main(["list"]) == 0
    assert capfd.readouterr().out == "first\n"
    main(["verify", "first"])
    assert "no run" not in capfd.readouterr().err


def test_a_folder_of_others(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who can write into a folder above, such as /tmp, must not choose what another one trains."""
    deep = project / "src"
    deep.mkdir()
    assert find_project(deep) == project
    monkeypatch.setattr(os, "geteuid", lambda: (project / "configs").stat().st_uid + 1)
    assert find_project(deep) is None
    assert find_project(project) == project  # here the user has chosen it by cd


def test_init_writes_here(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A new project inside another one stands where the command was typed."""
    (project / "src").mkdir()
    monkeypatch.chdir(project / "src")
    assert main(["init", "inner"]) == 0
    assert (project / "src" / "inner" / "digits.py").exists()


@pytest.fixture
def nowhere(here: Path) -> Path:
    """A folder with no project above it."""
    (here / "configs").unlink()
    return here


@pytest.mark.parametrize(
    "words", [["--local"], ["--nodes", "2"], ["--dry-run"], ["sweep", "seed=0..1"], ["prove"], ["train.epochs=3"]]
)
def test_no_project(words: list[str], nowhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ten minutes of a demo that nobody has asked for look like a training of one's own: it trains by its name."""
    said = refusal(words, capfd, nowhere)
    typed = command()
    assert said.startswith(f"no project here (no configs/ in {nowhere}, nor above it): `{typed} init` writes one; ")
    assert said.endswith(f"`{typed} --config mnist --local` trains the demo, handwritten digits")


def test_what_names_itself(nowhere: Path, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The demo by its name, a task that was typed, a configuration of one's own by its path: nothing is left to say."""
    (nowhere / "mine.yaml").write_text("seed: 7\n")
    for words in (["--config", "mnist"], ["task=classification"], ["--config", "mine.yaml"]):
        assert main(["--dry-run", *words]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("# config ")]
    assert [line.partition(",")[0] for line in said] == ["# config mnist", "# config none", "# config mine.yaml"]


def test_a_project_without_a_default(nowhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two configurations, and none of them is called default.yaml: which is meant is the user's to say."""
    (nowhere / "configs").mkdir()
    for name in ("large", "small"):
        (nowhere / "configs" / f"{name}.yaml").write_text("seed: 7\n")
    assert main(["--local"]) == 2
    assert capfd.readouterr().err == (
        "error: there is no configs/default.yaml; name a configuration: --config large or small\n"
    )


@pytest.mark.parametrize("text", ["", "# seed: 7\n", "\n---\n", "{}\n"])
def test_an_empty_configuration(text: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of it is commented out, or the editor has not saved it: the schema's defaults are another experiment."""
    (here / "mine.yaml").write_text(text)
    said = refusal(["--local", "--config", "mine.yaml", "seed=3"], capfd, here)
    assert said == "--config mine.yaml: sets no key, so Laststep's defaults would train; name the task in it"


def test_the_first_lines_say_what_trains(
    project: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Config, task and folder of runs, in 80 columns: a wrong one is seen before the first epoch, not the last."""
    monkeypatch.chdir(project)
    expected = "config configs/default.yaml, task digits.Digits, runs in runs\n"
    assert main(["--nodes", "2"]) == 0
    assert capfd.readouterr().out.startswith(expected)
    assert main(["--dry-run", "--name", "dry"]) == 0
    assert capfd.readouterr().out.startswith(f"# {expected}")
    assert main(["sweep", "seed=1,2"]) == 0
    assert capfd.readouterr().out.startswith(expected)
    assert main(["--config", "mnist", "--dry-run"]) == 0
    expected = "# config mnist, task classification (convnet on mnist-5k), runs in runs\n"
    assert capfd.readouterr().out.startswith(expected)

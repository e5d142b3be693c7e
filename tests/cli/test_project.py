"""The project that a command is about: that of the folder where it is typed, or of the nearest one above it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laststep.cli.main import find_project, main


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

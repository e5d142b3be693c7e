"""The code copy: a job runs the code as it was at submission, and the copy holds nothing but code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainer.cluster import code_copy
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.rundir import RunDir

TASK = "class Mine:\n    pass\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "run")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, where the command is typed."""
    folder = tmp_path / "mine"
    for name in (
        "my_task.py",
        "parts/model.py",
        "data.bin",
        "__pycache__/my_task.pyc",
        ".secret/key",
        "env/pyvenv.cfg",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TASK)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def copied(run: RunDir, task: str = "my_task.Mine") -> set[str]:
    """Copy the code; returns the user's files in the copy."""
    code_copy.copy_code(run, Config.load(None, [f"task={task}", f"launch.root={run.path.parent}"]))
    names = ("my_task.py", "parts", "data.bin", "__pycache__", ".secret", "env", "kept", "dropped.py", "gone.py")
    return {name for name in names if (run.code / name).exists()}


def test_a_folder_without_git(run: RunDir, here: Path) -> None:
    """All files are copied, except what is never code: caches, environments, hidden folders."""
    assert copied(run) == {"my_task.py", "parts", "data.bin"}
    assert (run.code / "parts" / "model.py").read_text() == TASK
    assert (run.code / "launch.py").exists() and (run.code / "trainer" / "data" / "mnist-5k").is_dir()
    assert not list(run.code.rglob("*.pyc"))


def test_a_folder_with_git(run: RunDir, here: Path) -> None:
    """Tracked and untracked files are copied as they are on disk; ignored and deleted ones are not."""
    (here / ".gitignore").write_text("/data.bin\ndropped.py\nenv/\n__pycache__/\n.secret/\n")
    (here / "dropped.py").write_text(TASK)
    (here / "gone.py").write_text(TASK)
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "-q"), ("add", "my_task.py", "gone.py"), ("commit", "-qm", "x")):
        subprocess.run([*git, *words], check=True)
    (here / "gone.py").unlink()
    (here / "my_task.py").write_text(TASK + "# edited\n")
    assert copied(run) == {"my_task.py", "parts"}
    assert (run.code / "my_task.py").read_text().endswith("# edited\n")


def test_only_what_the_task_needs(run: RunDir, here: Path) -> None:
    """Submitting a ready-made task from a home folder does not copy that folder."""
    assert copied(run, "classification") == set()


def test_runs_are_not_code(here: Path) -> None:
    """If the root is inside the folder, each copy would otherwise contain all earlier runs."""
    run = RunDir(here / "parts" / "results" / "run")
    (run.path.parent / "other").mkdir(parents=True)
    (run.path.parent / "other" / "log.txt").write_text("x")
    run.path.mkdir()
    assert "parts" in copied(run)
    assert not (run.code / "parts" / "results").exists()


def test_too_many_to_be_code(run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user gets one line instead of an hour of copying a data set."""
    monkeypatch.setattr(code_copy, "MOST_FILES", 2)
    with pytest.raises(ConfigError, match=r"has over 2 files: name what is not code in \.gitignore"):
        copied(run)


def test_a_disk_that_refuses(run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No partial copy is left: the next try starts over."""

    def full(source: Path, to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(ConfigError, match=r"the code could not be copied to .*No space left on device"):
        copied(run)
    assert not list(run.path.iterdir())

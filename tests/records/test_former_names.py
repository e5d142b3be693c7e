"""Runs of the time when the package was called `trainer`, and users who have a `trainer` of their own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.rundir import RunDir
from laststep.runs import run_config
from tests.support.project import DEADLINE_S, PROJECT

ELSEWHERE = f"import sys; sys.path[:] = [path for path in sys.path if path != {str(PROJECT)!r}]\n"
RESOLVING = "from laststep.records.former_names import resolve; resolve()\n"


def runs(code: str, folder: Path, *, path: Path) -> subprocess.CompletedProcess[str]:
    """Python with this code, where `path` holds the package."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that has the package alone, as site-packages does."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "laststep").symlink_to(PROJECT / "laststep")
    return folder


def begun(run: RunDir, version: str, task: str) -> None:
    """A run that this version began, with this task."""
    run.path.mkdir(parents=True)
    Config.load(None, [f"task={task}"]).save(run.config)
    line = {"job_id": "1", "time": 1.0, "version": version, "config": run.config.read_text()}
    run.submissions.write_text(json.dumps(line) + "\n")


def test_an_old_runs_task_has_its_present_name(tmp_path: Path) -> None:
    """Without this, no run of before could be resumed: its module is nowhere."""
    run = RunDir(tmp_path / "old")
    begun(run, "0.1.0", "trainer.tasks.classification.Classification")
    assert run_config.load(run).task == "laststep.tasks.classification.Classification"
    assert run_config.as_submitted(run).task == "laststep.tasks.classification.Classification"


def test_a_new_runs_task_keeps_its_name(tmp_path: Path) -> None:
    """It means the user's own module, which may be missing for a moment."""
    run = RunDir(tmp_path / "new")
    begun(run, "0.2.0", "trainer.tasks.classification.Classification")
    assert run_config.load(run).task == "trainer.tasks.classification.Classification"


def test_a_users_own_trainer_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an old run: a task that was theirs then must not become another class."""
    (tmp_path / "trainer.py").write_text("class Mine: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = RunDir(tmp_path / "old")
    begun(run, "0.1.0", "trainer.Mine")
    assert run_config.load(run).task == "trainer.Mine"


def test_old_imports_give_the_same_objects(tmp_path: Path, installed: Path) -> None:
    """A second copy of a module would have a Task of its own, of which the user's class is none."""
    code = (
        "import trainer.world.stop, laststep.ranks.stop\nassert trainer.world.stop is laststep.ranks.stop\n"
        "from trainer.config.config import Config as old\nfrom trainer import Task\nimport trainer.rundir, laststep\n"
        "from laststep.config.config import Config\nimport laststep.rundir\n"
        "print(old is Config, Task is laststep.Task, trainer is laststep, trainer.rundir is laststep.rundir)\n"
        "print(laststep.rundir.__spec__.name, laststep.__spec__.name)"
    )
    done = runs(ELSEWHERE + RESOLVING + code, tmp_path, path=installed)
    assert done.stdout.split() == [*["True"] * 4, "laststep.rundir", "laststep"], done.stderr
    assert "No module named 'trainer'" in runs(ELSEWHERE + code, tmp_path, path=installed).stderr


@pytest.mark.parametrize("theirs", ["trainer.py", "trainer/__init__.py"])
def test_theirs_is_imported(theirs: str, tmp_path: Path, installed: Path) -> None:
    """Thousands of repositories have one."""
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("whose = 'mine'\n")
    done = runs(RESOLVING + "import trainer; print(trainer.whose)\nimport trainer.task", tmp_path, path=installed)
    assert done.stdout == "mine\n" and "No module named 'trainer.task'" in done.stderr


def test_the_door_gives_the_same_objects(tmp_path: Path) -> None:
    """In a clone the folder trainer/ is where a reader begins; what it gives is no copy."""
    code = (
        "import laststep, trainer\nprint(all(getattr(trainer, n) is getattr(laststep, n) for n in laststep.__all__))\n"
    )
    done = runs(
        code + RESOLVING + "import trainer.task; print(trainer.task.Task is laststep.Task)", tmp_path, path=PROJECT
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_former_name_in_a_new_run(tmp_path: Path, installed: Path) -> None:
    """The line says what to type."""
    code = "from laststep.code.task_check import check_task; check_task('trainer.tasks.classification.Classification')"
    said = runs(ELSEWHERE + code, tmp_path, path=installed).stderr
    assert "Laststep's package is called laststep now: task=laststep.tasks.classification.Classification" in said


def test_a_task_beside_a_trainer_of_their_own(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Refused by versions before 0.2: two modules could not have one name."""
    (here / "trainer.py").write_text("from laststep import Task\n\nclass Mine(Task): ...\n")
    importlib.invalidate_caches()
    assert main(["--dry-run", "task=trainer.Mine"]) == 0
    capfd.readouterr()

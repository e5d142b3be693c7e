"""After a fix, `resume` says which code it runs, and asks where the answer matters."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.runs import run_folders
from tests.support.commands import refusal

BEFORE = "from laststep import Task\n\n\nclass Net(Task):\n    pass\n"
ERROR = 'rank 1 on n2 failed:\nTraceback (most recent call last):\n  File "{file}", line 5, in step\nKeyError: 3\n'


@pytest.fixture
def run(here: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunDir:
    """A run that was submitted from this folder, and whose job has left the queue."""
    monkeypatch.syspath_prepend(here)
    (here / "own.py").write_text(BEFORE)
    (here / "more.py").write_text("")
    assert main(["--name", "run", "task=own.Net"]) == 0
    (slurm / "squeue").write_text("#!/bin/sh\n")
    capfd.readouterr()
    return RunDir(here / "runs" / "run")


def fails(run: RunDir, file: str) -> None:
    """The run's job has ended with an error in this file."""
    (job,) = {line["job_id"] for line in read_lines(run.submissions) if "job_id" in line}
    record = {
        "attempt": 0,
        "job_id": job,
        "restart": 0,
        "hosts": ["n1", "n2"],
        "world_size": 2,
        "start": 1.0,
        "end": 2.0,
    }
    record |= {"start_step": 0, "end_step": 3, "reason": "failed", "lost_steps": 0, "error": ERROR.format(file=file)}
    run.attempts.write_text(json.dumps(record) + "\n")


def test_a_fix_is_not_ignored(run: RunDir, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run failed in a file, the user mended it and resumed: in a job the old code would fail there again, after
    another wait in the queue, without a word."""
    fails(run, f"{run.code}/own.py")
    (here / "own.py").write_text(BEFORE + "    fixed = True\n")
    said = refusal(["resume", "run"], capfd, here)
    assert "run: failed in own.py, line 5, in step, and that file has changed since: --code new takes" in said
    assert main(["resume", "run", "--code", "new"]) == 0
    assert "fixed" in (run.code / "own.py").read_text()
    assert "code   as it is now; changed since the run was submitted: own.py\n" in capfd.readouterr().out
    assert read_lines(run.submissions)[-1]["code"] == "new"


def test_the_same_code_by_default(run: RunDir, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that was ended from outside continues with the code that it trained with; files changed since are named."""
    (here / "own.py").write_text(BEFORE + "    later = True\n")
    (here / "new.py").write_text("")
    (here / "more.py").unlink()
    assert main(["resume", "run"]) == 0
    said = capfd.readouterr().out
    assert "code   as submitted; changed since: more.py, new.py, own.py (--code new takes that)\n" in said
    assert "later" not in (run.code / "own.py").read_text()
    assert read_lines(run.submissions)[-1]["code"] == "same"


def test_asked_to_keep_it(run: RunDir, here: Path) -> None:
    """The user may want the old code, for a change that has nothing to do with the failure."""
    fails(run, f"{run.code}/own.py")
    (here / "own.py").write_text(BEFORE + "    later = True\n")
    assert main(["resume", "run", "--code", "same"]) == 0
    assert "later" not in (run.code / "own.py").read_text()


def test_nothing_has_changed(run: RunDir, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing to choose, nothing to say: a failure of the disk or of a library is resumed as ever."""
    fails(run, f"{run.code}/own.py")
    assert main(["resume", "run"]) == 0
    assert "code " not in capfd.readouterr().out


def test_a_fix_of_a_run_on_this_machine(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Such a run has no copy: its next attempt runs the code as it is now, and says what was edited meanwhile."""
    monkeypatch.syspath_prepend(here)
    (here / "own.py").write_text(BEFORE)
    (here / "more.py").write_text("")
    config = Config.load(None, [f"launch.root={here / 'runs'}", "launch.name=run", "task=own.Net"])
    run = run_folders.create(config)
    run_folders.record_submission(run, "local-1")
    old, later = time.time() - 60, time.time() + 60
    for name, moment in (("own.py", later), ("more.py", old)):
        os.utime(here / name, (moment, moment))
    assert main(["resume", "run", "--local", "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert "code   as it is now; changed since the run was last started: own.py\n" in said
    os.utime(here / "own.py", (old, old))
    assert main(["resume", "run", "--local", "--dry-run"]) == 0
    assert "code " not in capfd.readouterr().out


def test_where_the_copy_does_not_run(run: RunDir, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On this machine the live code runs: `--code same` could not be kept."""
    assert "--code same: --local and --debug run the code as it is now" in refusal(
        ["resume", "run", "--local", "--code", "same"], capfd, here
    )

"""`laststep disk`: what runs hold, and what may go: nothing of a run that lives, no checkpoint that is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from laststep.checkpoint.store import CheckpointStore
from laststep.cli.main import main
from laststep.config.config import Config
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.slurm.launchers import SMALL
from tests.support.runs import undisturbed_folder


def disk(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["disk", "--json", f"launch.root={root}"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that it prints remove what it says, and the run is still whole: its newest and its best checkpoint
    are there."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    words = (*SMALL, "train.epochs=4", "checkpoint.keep_last=4", "checkpoint.keep_best=1")
    done = undisturbed_folder(Config.load("mnist", words))
    shutil.copytree(done.path, root / "done", symlinks=True)
    shutil.copytree(done.path, root / "stopped", symlinks=True)
    finished, stopped = RunDir(root / "done"), RunDir(root / "stopped")
    stopped.attempts.write_text(stopped.attempts.read_text().replace('"finished"', '"preempted"'))
    (stopped.compiled / "kernels").mkdir(parents=True)
    (stopped.compiled / "kernels" / "a").write_bytes(b"x" * 5000)
    used, unused, left = (root / ".environments" / name for name in ("used-1", "unused-1", "left-1.0f.tmp"))
    for folder in (used, unused, left):
        folder.mkdir(parents=True)
        (folder / "package").write_bytes(b"x" * 1000)
    os.utime(left, (time.time() - 2e5,) * 2)
    stopped.environment.symlink_to("../.environments/used-1")
    before = CheckpointStore(finished.checkpoints).steps()
    found = disk(root, capsys)
    assert {use["run"]: use["state"] for use in found["runs"]} == {"done": "finished", "stopped": "stopped"}
    on_disk = sum(path.lstat().st_size for path in finished.path.rglob("*") if path.is_file() and not path.is_symlink())
    (use,) = [use for use in found["runs"] if use["run"] == "done"]
    assert sum(use[part] for part in ("checkpoints", "code", "logs", "other")) == on_disk
    assert [(shared["bytes"], shared["runs"]) for shared in found["environments"]] == [(1000, []), (1000, ["stopped"])]
    assert len(found["may_go"]) == 4 and len(before) == 4
    for spare in found["may_go"]:
        subprocess.run(["bash", "-ec", spare["command"]], check=True)
    assert used.exists() and not unused.exists() and not left.exists() and not stopped.compiled.exists()
    assert CheckpointStore(stopped.checkpoints).steps() == before, "it may be resumed from any of them"
    kept = CheckpointStore(finished.checkpoints).steps()
    losses = {line["step"]: line["val_loss"] for line in read_lines(finished.metrics) if "val_loss" in line}
    assert kept == sorted({before[-1], min(losses, key=lambda step: losses[step])}) and len(kept) < len(before)
    assert not disk(root, capsys)["may_go"]
    assert main(["disk", f"launch.root={root}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "nothing that may go" in lines and all(len(line) <= 80 for line in lines)


def test_no_such_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt folder is no empty one."""
    assert main(["disk", f"launch.root={tmp_path / 'rnus'}"]) == 2
    assert "there is no such folder" in capsys.readouterr().err

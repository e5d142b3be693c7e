"""A script that reads its words with Hydra, in an environment of its own: hydra-core 1.3 needs OmegaConf below 2.4."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laststep.rundir import RunDir
from tests.support.commands import begin, end
from tests.support.project import PROJECT
from tests.support.ranks import fingerprint, reasons


@pytest.fixture
def types(tmp_path: Path) -> Callable[..., str]:
    """Types a command in a user's folder, where Hydra and its OmegaConf come before this environment's packages."""
    packages = tmp_path / "packages"
    quickly = ("--no-build-isolation", "--no-compile")  # what builds a package of Hydra's is here already
    install = [sys.executable, "-m", "pip", "install", "--quiet", *quickly, "--target", str(packages)]
    subprocess.run([*install, "hydra-core>=1.3,<1.4"], check=True, timeout=300)
    for name in ("hydra_train.py", "conf"):
        source = PROJECT / "tests" / "cli" / "user_scripts" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)

    def typed(*words: str, status: int = 0, **env: str) -> str:
        path = os.pathsep.join((str(packages), str(PROJECT)))
        command = [sys.executable, str(PROJECT / "launch.py"), *words]
        return "".join(end(begin(tmp_path, command, {"PYTHONPATH": path, **env}), status))

    return typed


def test_its_words_are_hydras(types: Callable[..., str], tmp_path: Path) -> None:
    """Many scripts read their settings with Hydra: words after the script's name are Hydra's alone, at the resume too,
    and a stop leaves its `main` without an error of Hydra's. Else such a script would train with other settings, or
    could not be stopped."""
    local = ("--local", "--tasks-per-node", "2", "device=cpu", "--name")
    script = ("hydra_train.py", "optim.lr=0.1", "steps=12")
    said = types(*local, "whole", *script)
    assert "trained with lr 0.1" in said
    stopped = types(*local, "stopped", *script, STOP_IN="5", status=143)
    assert "trained" not in stopped and "Error" not in stopped and "HYDRA_FULL_ERROR" not in stopped
    assert "trained with lr 0.1" in types("resume", "stopped", "--local")
    whole, again = (RunDir(tmp_path / "runs" / name) for name in ("whole", "stopped"))
    assert reasons(again) == ["cancelled", "finished"]
    assert fingerprint(again) == fingerprint(whole)

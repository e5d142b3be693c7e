"""A framework that is not installed: one line, with the command that installs it. One that is not used: no import."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laststep import frameworks
from laststep.code.task_check import check_task
from laststep.config.errors import ConfigError
from tests.support.forked import forked_python
from tests.support.needs import OPTIONAL
from tests.support.project import DEADLINE_S, PROJECT
from tests.support.runs import SMALL

LOOPS = "tests.support.custom_loops"


@pytest.mark.parametrize("adapter", ["fabric", "lightning", "ray", "transformers"])
def test_an_adapter_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    """In a rank, which may have another environment than the command."""
    name = f"laststep.frameworks.{adapter}"
    package = frameworks.PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, None)
    for each in frameworks.PACKAGES:  # one may import another
        monkeypatch.delitem(sys.modules, each, raising=False)
    with pytest.raises(ConfigError, match=rf"laststep.frameworks.\w+ needs {package}: pip install '{package}.*>=\d"):
        importlib.import_module(name)


def test_the_command_says_so_before_it_submits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without importing the script: a job that fails after hours in the queue would be worse."""
    (tmp_path / "mine.py").write_text("from laststep.frameworks.lightning import Trainer\ndef main(run): ...\n")
    monkeypatch.setitem(frameworks.PACKAGES, "laststep.frameworks.lightning", "not_installed")
    monkeypatch.setitem(frameworks.VERSIONS, "not_installed", "not_installed>=1")
    with pytest.raises(ConfigError, match=r"task=mine.main: .*needs not_installed: pip install 'not_installed>=1'"):
        check_task("mine.main", [tmp_path])


def test_a_rank_imports_no_framework_by_itself(tmp_path: Path) -> None:
    """Each would add seconds to every start of every rank, of those too who use none."""
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('laststep', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end\n"
        f"print('imported', sorted({{name.split('.')[0] for name in sys.modules}} & {set(OPTIONAL)}))\n"
    )
    for words in (
        [*SMALL, "train.max_steps=2"],
        [f"task={LOOPS}.as_long_as_configured", "train.epochs=1", "device=cpu"],
    ):
        done = subprocess.run(
            [forked_python(), "-c", code, *words, f"launch.root={tmp_path}", "--name", f"run{len(words)}"],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.stdout.splitlines()[-1:] == ["imported []"], done.stdout + done.stderr

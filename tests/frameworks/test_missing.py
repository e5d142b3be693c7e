"""A framework that is not installed: one line, with the command that installs it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from trainer import frameworks
from trainer.cluster.task_check import check_task
from trainer.config.errors import ConfigError


@pytest.mark.parametrize("adapter", ["fabric", "lightning", "ray", "transformers"])
def test_an_adapter_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    """In a rank, which may have another environment than the command."""
    name = f"trainer.frameworks.{adapter}"
    package = frameworks.PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, None)
    for each in frameworks.PACKAGES:  # one may import another
        monkeypatch.delitem(sys.modules, each, raising=False)
    with pytest.raises(ConfigError, match=rf"trainer.frameworks.\w+ needs {package}: pip install '{package}.*>=\d"):
        importlib.import_module(name)


def test_the_command_says_so_before_it_submits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without importing the script: a job that fails after hours in the queue would be worse."""
    (tmp_path / "mine.py").write_text("from trainer.frameworks.lightning import Trainer\ndef main(run): ...\n")
    monkeypatch.setitem(frameworks.PACKAGES, "trainer.frameworks.lightning", "not_installed")
    monkeypatch.setitem(frameworks.VERSIONS, "not_installed", "not_installed>=1")
    with pytest.raises(ConfigError, match=r"task=mine.main: .*needs not_installed: pip install 'not_installed>=1'"):
        check_task("mine.main", [tmp_path])

"""Attempts of a proof on ranks that are forked: they cost little more than their training."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from laststep.config.config import PACKAGED, Config
from laststep.rundir import RunDir
from laststep.submission import local
from tests.support.project import PROJECT
from tests.support.ranks import Attempt


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Attempts on forked ranks, typed in a folder of the test's own: each proof copies the folder in which it is."""

    def train(config: Config, run: RunDir) -> str | None:
        here = Path.cwd()
        os.chdir(PROJECT)  # the server that forks the ranks keeps the folder in which it starts: no throwaway copy
        try:
            Attempt(config, config.launch.env, before=functools.partial(os.chdir, here)).wait()
        finally:
            os.chdir(here)
        return None

    (own := tmp_path / "own").mkdir()
    (own / "configs").symlink_to(PACKAGED)
    monkeypatch.chdir(own)
    monkeypatch.setattr(local, "train_here", train)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

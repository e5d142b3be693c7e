"""What torch's compiler makes is kept for the next attempt: tests/loops/test_exact.py has a run that reuses it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from laststep import compat

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch/_inductor/runtime/cache_dir_utils.py


def test_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run's folder, where the next attempt finds it on any node, unless the user has chosen another place."""
    monkeypatch.setenv(CACHE, "/scratch/kernels")
    compat.cache_in(tmp_path / "compiled")
    assert os.environ[CACHE] == "/scratch/kernels"
    monkeypatch.delenv(CACHE)
    compat.cache_in(tmp_path / "compiled")
    assert Path(os.environ[CACHE]).parent == tmp_path / "compiled"


def test_compiled_code_where_locks_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some Lustre mounts: torch locks what it writes, so in the run's folder it and the run would fail."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setattr("fcntl.flock", flock)
    compat.cache_in(tmp_path / "compiled")
    assert CACHE not in os.environ

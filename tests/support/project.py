"""The project's folder, what the processes of one test session share, how tests wait, and silent collectives."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pytest


PROJECT = Path(__file__).resolve().parent.parent.parent
# Either makes gloo silent, see tests/silent/silent_backend.py: this folder on PYTHONPATH for ranks that are started as
# commands, this variable for those that are forked from a test process (tests/support/ranks.py).
SILENT_PATH = str(PROJECT / "tests" / "silent")
SILENT = "LASTSTEP_TEST_SILENT"


def install_finder(name: str, mapping: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python find these modules by setuptools' own finder: the module that an editable install generates."""
    from setuptools.command.editable_wheel import _finder_template  # type: ignore[import-untyped]

    module = ModuleType(f"__editable___{name}_finder")
    exec("".join(_finder_template(name, mapping, {})), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path_hooks", list(sys.path_hooks))
    monkeypatch.setattr(sys, "path", list(sys.path))
    module.install()


T = TypeVar("T")

# Generous: a busy machine must not fail a test, and a test that passes never waits this long.
DEADLINE_S = 300.0


def wait_until(condition: Callable[[], T], failure: str, poll_s: float = 0.02) -> T:
    """Poll until `condition` returns something true and return that; fail the test with `failure` at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{failure} (waited {DEADLINE_S:.0f} s)"
        time.sleep(poll_s)
    return value


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what the process prints up to the line with `text`; kill it and fail the test if that does not appear."""
    said, late = "", threading.Timer(DEADLINE_S, process.kill)
    late.start()
    for line in process.stdout or ():
        said += line
        if text in line:
            late.cancel()
            return said
    late.cancel()
    raise AssertionError(f"{text!r} was not printed within {DEADLINE_S:.0f} s:\n{said}")


VARIABLE = "LASTSTEP_TESTS_SHARED"  # pytest-xdist's workers inherit it from the process that starts them


def make_shared_folder() -> None:
    """Make the folder of this session."""
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="laststep-tests-")
    (shared_folder() / "owner").write_text(str(os.getpid()))


def remove_shared_folder() -> None:
    """Remove the folder of this session."""
    shutil.rmtree(os.environ[VARIABLE], ignore_errors=True)


def shared_folder() -> Path:
    """The folder of this session."""
    return Path(os.environ[VARIABLE])


def owner() -> int:
    """The pid of the process that the whole session lasts as long as."""
    return int((shared_folder() / "owner").read_text())


@contextmanager
def shared_lock(name: str) -> Iterator[None]:
    """Hold the lock with this name: one process of the session at a time. A process that dies releases it."""
    with (shared_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

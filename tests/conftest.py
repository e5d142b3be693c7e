"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laststep.config.config import PACKAGED
from laststep.ranks.process import STOP_SIGNALS
from tests.support.commands import FAKE_SBATCH, NO_SLURM, fake_squeue
from tests.support.project import SILENT, SILENT_PATH, make_shared_folder, remove_shared_folder
from tests.support.running_order import arrange, missing

# Hundreds of processes import the project: each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Two cores and many ranks: more threads than cores would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
if SILENT in os.environ:  # make test-silent
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SILENT_PATH, os.environ.get("PYTHONPATH")]))
# The commands that messages name begin with the word that started Python.
sys.orig_argv[0] = "python"
# A shell starts what it sends to the background with Ctrl-C ignored, and nohup ignores a closed terminal. What the
# tests start would inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

with contextlib.suppress(ImportError):  # on a machine with a GPU
    from hypothesis import settings

    # An example that takes 0.2 s on a busy machine is no defect, though hypothesis would call it one.
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """What a test has done to this process's signals and environment ends with it: a program that a later test starts
    would inherit that Ctrl-C is ignored, or would believe that it is a rank of a job."""
    before, environ = {number: signal.getsignal(number) for number in STOP_SIGNALS}, dict(os.environ)
    yield
    for name in {*environ, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in environ:
            del os.environ[name]
        elif os.environ.get(name) != environ[name]:
            os.environ[name] = environ[name]
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of pytest-xdist's processes, which another one started."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if not is_worker(config):
        make_shared_folder()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what a failed test has left: Python would wait at its exit for loader workers, which ignore SIGTERM."""
    for child in multiprocessing.active_children():
        child.kill()
    if not is_worker(config):
        remove_shared_folder()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = not any("::" in word for word in config.args) and "LASTSTEP_GPU_CHECK" not in os.environ
    if whole and (gone := missing(item.nodeid for item in items)):
        raise pytest.UsageError(f"tests/support/running_order.py: LONG names no test: {gone}")
    for item in items:
        if "tests/slurm/" in item.nodeid:
            item.add_marker(pytest.mark.slurm)
    items[:] = arrange(items)


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects, which the garbage collector would look at again and again


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs of all tests in a module."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to type commands in, which has a clone's configurations and nothing else, on a machine without Slurm
    and without a GPU."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "configs").symlink_to(PACKAGED)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", NO_SLURM)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


@pytest.fixture
def slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake sbatch that accepts every job and copies its script to `submitted.sh`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", FAKE_SBATCH), ("srun", "#!/bin/sh\n"), ("squeue", fake_squeue("4711"))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return programs

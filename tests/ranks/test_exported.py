"""Ranks of every launcher have torchrun's variables, and nobody else takes them for their own."""

from __future__ import annotations

import os
import socket

import pytest

from laststep.ranks.launchers import EXPORTED, VARIABLES, detect_world, export_world, forget_exported, free_port
from tests.support.records import a_world


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell."""
    for name in (*VARIABLES, EXPORTED, "SUBMITIT_EXECUTOR", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that it is unset again afterwards
        monkeypatch.delenv(name)


def exported() -> dict[str, str]:
    """The variables that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@pytest.mark.parametrize("launcher", ["submitit-slurm", "submitit-local", "spawn", "mpirun", "srun", "python"])
def test_every_launcher(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of an outer launcher (a torchrun that started `--spawn`) is of other ranks. It is back afterwards: the
    process may be the user's own program."""
    monkeypatch.setenv("RANK", "5")
    undo = export_world(a_world(3, 4, launcher, local_rank=1, local_size=2), "node1", 1234)
    assert list(exported().values()) == ["3", "4", "1", "2", "node1", "1234"]
    undo()
    assert exported() == {"RANK": "5"}


def test_a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is missing is added. They say who this process is: a task that asks again gets the same answer."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    world = detect_world()
    export_world(world, "node1", 1234)
    assert exported()["MASTER_ADDR"] == "node1" and exported()["RANK"] == "3"
    assert (detect_world().rank, detect_world().size) == (3, 4) and exported()["RANK"] == "3"


def test_torchruns_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay: torch's rendezvous connects to the store that torchrun serves there."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    export_world(a_world(launcher="torchrun"), "node1", 1234)
    assert exported() == {"MASTER_PORT": "29500"}


def in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process is another than the one that has set the variables."""
    monkeypatch.setattr(os, "getpid", lambda: -1)


def test_the_rank_itself_keeps_them() -> None:
    """A task may ask for its rank before Accelerate does."""
    export_world(a_world(1, 2, "srun"), "node1", 1234)
    detect_world()
    assert exported()["RANK"] == "1"


def test_a_child_is_not_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run that a rank's code starts waits for the rank's peers, or at a port where nobody serves."""
    export_world(a_world(1, 2, "srun"), "node1", 1234)
    in_a_child(monkeypatch)
    assert (detect_world().size, detect_world().launcher, exported()) == (1, "python", {})


def test_a_childs_own_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launcher has set the variables anew for a process that a rank started through it."""
    export_world(a_world(1, 2, "srun"), "node1", 1234)
    monkeypatch.setenv("MASTER_PORT", "4321")
    in_a_child(monkeypatch)
    forget_exported()
    assert exported()["RANK"] == "1"


def test_the_port_is_free() -> None:
    """A script may serve a store of its own there."""
    socket.create_server(("", free_port())).close()

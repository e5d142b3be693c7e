"""The throwaway Slurm that the tests of this folder share, and the users who type commands at it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.desk import Desk
from tests.slurm.user import User
from tests.support.needs import require, require_program


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm."""
    require(missing())
    started = Cluster.start(tmp_path_factory.mktemp("slurm"), owner=os.getpid())
    yield started
    started.stop()


@pytest.fixture(scope="session")
def user(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(cluster, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def plain(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user whose ranks are started by Python itself, for tests of what Slurm and the kernel do with a rank."""
    return User(cluster, tmp_path_factory.mktemp("plain-runs"), sys.executable)


@pytest.fixture(scope="session")
def launchers(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A desk on a machine that has every launcher."""
    desk = Desk(cluster, tmp_path_factory.mktemp("desk"))
    require_program("mpirun", "apt-get install openmpi-bin", desk.env["PATH"])
    require_program("jupyter-execute", "pip install nbclient ipykernel", desk.env["PATH"])
    return desk


@pytest.fixture
def desk(launchers: Desk) -> Iterator[Desk]:
    yield launchers
    launchers.tidies_up()

"""The throwaway Slurm that the tests of this folder share, and the users who type commands at it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.desk import Desk
from tests.slurm.user import User, begun, end_what_began
from tests.support.needs import require, require_program
from tests.support.project import SILENT_PATH


@pytest.fixture(autouse=True)
def _nothing_stays_at_work() -> Iterator[None]:
    """What a test has begun ends with it, and a failed one shows what that has printed."""
    before = len(begun)
    yield
    end_what_began(before)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm; with LASTSTEP_ACCOUNTING=0 it has no accounting."""
    require(missing())
    accounting = os.environ.get("LASTSTEP_ACCOUNTING") != "0"
    started = Cluster.start(tmp_path_factory.mktemp("slurm"), accounting=accounting, owner=os.getpid())
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
def silent(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user whose collectives do not fail when a rank dies, as NCCL's. Python itself starts the ranks, as torch loads
    that backend."""
    user = User(cluster, tmp_path_factory.mktemp("silent-runs"), sys.executable)
    user.env["PYTHONPATH"] = SILENT_PATH
    return user


@pytest.fixture(scope="session")
def desks(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Desk]:
    """Desks on a machine that has every launcher, by the `python` that is there."""
    desks = {python: Desk(cluster, tmp_path_factory.mktemp("desk"), python) for python in (None, sys.executable)}
    require_program("mpirun", "apt-get install openmpi-bin", desks[None].env["PATH"])
    require_program("jupyter-execute", "pip install nbclient ipykernel", desks[None].env["PATH"])
    return desks


@pytest.fixture
def desk(desks: dict[str | None, Desk]) -> Iterator[Desk]:
    yield desks[None]
    desks[None].tidies_up()


@pytest.fixture
def plain_desk(desks: dict[str | None, Desk]) -> Iterator[Desk]:
    """A desk with Python itself, as `plain` has."""
    yield desks[sys.executable]
    desks[sys.executable].tidies_up()


@pytest.fixture(scope="session")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of a cluster whose nodes die. One that is silent for 40 s is DOWN."""
    require(missing())
    folder = tmp_path_factory.mktemp("nodes")
    cluster = Cluster.start(folder / "slurm", slurmd_timeout_s=40, accounting=False, owner=os.getpid())
    yield User(cluster, folder / "runs")
    cluster.stop()

"""`launch.py --nodes 2` where each node is a host with an address of its own, and names do not resolve."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.cluster import missing as missing_slurm
from tests.slurm.hosts import Hosts, missing
from tests.slurm.user import User
from tests.support.needs import require
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint
from tests.support.runs import config, undisturbed


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require(missing() or missing_slurm())
    with Hosts(2) as two:
        yield two


@pytest.fixture(scope="module")
def distant(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of a Slurm with these hosts as nodes."""
    folder = tmp_path_factory.mktemp("distant")
    started = Cluster.start(folder / "slurm", owner=os.getpid(), accounting=False, hosts=hosts)
    yield User(started, folder)
    started.stop()


def submits(user: User, name: str, per_node: int, *options: str) -> None:
    """Submit a small run with `python launch.py --nodes 2`."""
    written = user.root / f"{name}.yaml"
    config(user.root, name, 2 * per_node, options).save(written)
    user.types("--nodes", "2", "--tasks-per-node", str(per_node), "--name", name, "--config", str(written))


def test_two_nodes_meet_over_a_real_link(distant: User) -> None:
    """The weights are those of the same number of ranks on one host. Only its address leads to rank 0, as no name
    resolves."""
    submits(distant, "met", 2)
    (attempt,) = distant.waits_for_end("met", "finished")
    assert attempt["hosts"] == ["h1", "h2"]
    assert fingerprint(distant.run("met")) == undisturbed(4, ())


def test_the_link_between_two_nodes_drops(distant: User, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes can reach the controller, but not each other. The attempt ends without losing a step, and reports which
    rank is out of reach. srun, on one of the nodes, would wait indefinitely for the rank on the other and keep the job;
    the job starts again all the same, and the run continues when the link is back."""
    folder = distant.root / "hold"
    folder.mkdir()
    monkeypatch.setitem(distant.env, "LASTSTEP_TEST_HOLD", f"5 {folder}")
    submits(distant, "cut", 1, "task=tests.support.tasks.Held", "launch.hang_timeout_s=6")
    distant.cluster.wait_for(
        lambda: len(list(folder.iterdir())) == 2, DEADLINE_S, "not every rank is in its fifth step"
    )
    hosts.cut()
    (folder / "go").touch()
    first, *_ = distant.waits_for_end("cut", "hung")
    assert (first["end_step"], first["lost_steps"], first["requeue"]) == (4, 0, True)
    assert "rank 1 on h2 gives no sign of life" in first["error"] or "rank 0 on h1 has not answered" in first["error"]
    distant.waits_for("cut", "restart 1, job step 0; submitit-slurm")
    hosts.mend()
    *_, last = distant.waits_for_end("cut", "finished")
    assert (last["job_id"], last["start_step"]) == (first["job_id"], 4), "the same job, started again"
    assert fingerprint(distant.run("cut")) == undisturbed(2, ())

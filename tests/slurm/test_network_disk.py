"""A job whose nodes share the runs by a network file system, each with its own memory of what there is.

A node sees what another one has created only if it looks for it: the memory lasts longer than any test. On a real NFS
each of these would have cost a minute, and the allocation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.cluster import missing as missing_slurm
from tests.slurm.launchers import IN_EPOCH_2, UNHURRIED
from tests.slurm.test_nodes import trains, undisturbed
from tests.slurm.test_restart import starts
from tests.slurm.user import User
from tests.support.clients import Clients, missing
from tests.support.needs import require
from tests.support.ranks import fingerprint

REMEMBERED_S = 3600.0
NODES = ("n1", "n2", "n3")
FAULT = "launch.env.LASTSTEP_TEST_FAULT"


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of a Slurm each node of which is a client of its own. The user sits at the server."""
    require(missing() or missing_slurm())
    folder = tmp_path_factory.mktemp("apart")
    (folder / "runs").mkdir()
    with Clients(folder / "runs", len(NODES), REMEMBERED_S, write_back_s=0.5) as clients:
        started = Cluster.start(
            folder / "slurm", owner=os.getpid(), accounting=False, slurmd_timeout_s=40, nodes=NODES, clients=clients
        )
        yield User(started, folder / "runs")
        started.stop()


def test_a_killed_rank_starts_again_in_its_step(apart: User) -> None:
    """The supervisors of two nodes agree by files that each of them looks for."""
    words = ("task=tests.support.tasks.Faulty", "train.max_steps=6", f"{FAULT}=kill step 4 rank 1")
    apart.types("--nodes", "2", "--name", "kept", *UNHURRIED, *words)
    first, second = apart.waits_for_end("kept", "finished")
    assert starts(apart, "kept") == [("failed", 0, 0, 0), ("finished", 0, 0, 1)]
    assert (first["end_step"], first["lost_steps"], second["start_step"]) == (3, 0, 3)


def test_a_rank_dies_with_its_supervisor(apart: User) -> None:
    """The batch shell, on another node than the survivor, reads the record and the checkpoint, and starts the ranks
    again by another srun. Rank 0 dies: nobody on the shell's node has seen what the survivor has saved."""
    apart.types("--nodes", "2", "--name", "shell", *UNHURRIED)
    apart.waits_for("shell", IN_EPOCH_2)
    apart.kills("shell", 0)
    first, second = apart.waits_for_end("shell", "finished")
    assert (first["reason"], first["lost_steps"]) == ("failed", 0)
    assert second["start_step"] == first["end_step"] >= 50 and second["restart"] == 0
    assert fingerprint(apart.run("shell")) == undisturbed(2)


def test_a_spare_node_replaces_a_dead_one(apart: User) -> None:
    """The rank that records the end asks the batch shell, on another node, to end srun. It dies with its node, so the
    shell's node has seen nothing of the last step."""
    apart.types("--nodes", "2", "launch.spare_nodes=1", "--name", "spare", *UNHURRIED)
    apart.waits_for("spare", IN_EPOCH_2)
    _, dead = trains(apart, "spare", 0)
    apart.kills_node(dead)
    first, second = apart.waits_for_end("spare", "finished")
    apart.cluster.start_daemon(f"slurmd.{dead}")
    assert (first["reason"], first["blamed"], first["lost_steps"]) == ("failed", [dead], 0)
    assert second["start_step"] == first["end_step"] and dead not in second["hosts"]
    assert (first["job_id"], second["restart"]) == (second["job_id"], 0)
    assert fingerprint(apart.run("spare")) == undisturbed(2)


def test_a_requeue(apart: User) -> None:
    """The job's next start is on any nodes. Its rank 0 begins at the step that a rank on another node has saved."""
    apart.types("--nodes", "2", "--name", "queued", "launch.max_restarts=0", *UNHURRIED)
    apart.waits_for("queued", IN_EPOCH_2)
    apart.kills("queued", 0)
    first, second = apart.waits_for_end("queued", "finished")
    assert (first["reason"], first["lost_steps"], second["restart"]) == ("failed", 0, 1)
    assert second["start_step"] == first["end_step"] >= 50
    assert fingerprint(apart.run("queued")) == undisturbed(2)

"""A sharded run on a real Slurm: whatever ends an attempt, each shard survives on some node, and no step is lost."""

from __future__ import annotations

from laststep.config.config import Config
from tests.slurm.launchers import UNHURRIED
from tests.slurm.test_nodes import trains
from tests.slurm.user import User
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint
from tests.support.runs import undisturbed_run

# One epoch: only a stop or a rescue saves in it. Each rank keeps copies of the shard of a rank on the other node, and
# begins no step before those of the last one are complete.
COPIED = (
    *UNHURRIED, "data.args.samples=960", "train.sharding=full", "checkpoint.replicas=1",
    "checkpoint.replica_every_steps=1", "optim.name=adamw", "optim.lr=0.001", "train.ema_decay=0.9",
)  # fmt: skip


def test_requeued_killed_and_without_a_node(fragile: User) -> None:
    """Four ranks on two nodes, and a spare node. The job is requeued, then a rank is killed, then a node dies with two
    shards: each time the run continues at its last step, and it ends with the bits of a calm one."""
    fragile.types("--nodes", "2", "--tasks-per-node", "2", "launch.spare_nodes=1", "--name", "shards", *COPIED)
    trains(fragile, "shards", 0)
    fragile.cluster.run("scontrol", "requeue", fragile.job_of("shards"))
    trains(fragile, "shards", 1)
    fragile.kills("shards", 3)
    _, dead = trains(fragile, "shards", 2)
    fragile.kills_node(dead)
    ends = fragile.waits_for_end("shards", "finished")
    fragile.cluster.start_daemon(f"slurmd.{dead}")

    assert [end["reason"] for end in ends] == ["preempted", "failed", "failed", "finished"]
    assert [end["lost_steps"] for end in ends] == [0, 0, 0, 0]
    assert [end["start_step"] for end in ends[1:]] == [end["end_step"] for end in ends[:-1]]
    assert (ends[0]["job_id"], ends[1]["restart"]) == (ends[3]["job_id"], 1), "one job, requeued once"
    assert ends[2]["blamed"] == [dead] and dead not in ends[3]["hosts"]
    calm = Config.load("mnist", [*COPIED, "checkpoint.replicas=0", "launch.tasks_per_node=4"])
    assert fingerprint(fragile.run("shards")) == undisturbed_run(calm)
    fragile.waits_until_gone(fragile.job_of("shards"), DEADLINE_S)

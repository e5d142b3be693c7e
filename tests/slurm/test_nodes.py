"""A node of a job dies, or keeps failing, on a real Slurm: the run continues on other nodes, and leaves a bad one."""

from __future__ import annotations

import time
from typing import Any

from laststep.config.config import Config
from laststep.records.metrics import newest_step, read_lines
from tests.slurm.launchers import IN_EPOCH_2, UNHURRIED
from tests.slurm.user import User
from tests.support.ranks import fingerprint
from tests.support.runs import undisturbed_run

SPARE = ("--nodes", "2", "launch.spare_nodes=1")
SOON_S = 30.0  # 10 s on an idle machine; Slurm itself takes minutes to notice a dead node


def trains(user: User, name: str, attempt: int) -> list[str]:
    """Wait until this attempt has done a step; returns its nodes."""
    run = user.run(name)

    def hosts() -> list[str]:
        records = [record for record in read_lines(run.attempt_now) if record["attempt"] == attempt]
        done = [record for record in records if (newest_step(run.metrics) or {"time": 0})["time"] > record["start"]]
        return done[0]["hosts"] if done else []

    return user.waits(name, hosts, f"did no step in attempt {attempt}")


def undisturbed(ranks: int) -> dict[str, Any]:
    """The fingerprint of an undisturbed run, on one host."""
    return undisturbed_run(Config.load("mnist", [*UNHURRIED, f"launch.tasks_per_node={ranks}"]))


def test_a_spare_node_replaces_a_dead_one(fragile: User) -> None:
    """A node loses its slurmd and its rank, as in a power cut. Slurm has not even noticed when the ranks start again on
    the spare node: the same job, no queue, no lost step, the same bits."""
    said = fragile.types(*SPARE, "--name", "spare", *UNHURRIED)
    assert "2 nodes + 1 spare x 1 rank" in said
    fragile.waits_for("spare", IN_EPOCH_2)
    shell, dead = trains(fragile, "spare", 0)
    fragile.kills_node(dead)
    died_at = time.time()
    first, second = fragile.waits_for_end("spare", "finished")
    fragile.cluster.start_daemon(f"slurmd.{dead}")
    assert (first["reason"], first["blamed"], second["hosts"][0]) == ("failed", [dead], shell)
    assert second["hosts"][1] not in (shell, dead)
    assert (first["job_id"], first["restart"]) == (second["job_id"], second["restart"]) and first["lost_steps"] == 0
    assert second["start"] - died_at < SOON_S, "the job waited for the dead node"
    assert fingerprint(fragile.run("spare")) == undisturbed(2)


def test_a_range_shrinks(fragile: User) -> None:
    """Without a spare node a job on 1-2 nodes continues on the one that is left."""
    fragile.types("--nodes", "1-2", "--name", "range", *UNHURRIED)
    fragile.waits_for("range", IN_EPOCH_2)
    shell, dead = trains(fragile, "range", 0)
    fragile.kills_node(dead)
    died_at = time.time()
    first, second = fragile.waits_for_end("range", "finished")
    fragile.cluster.start_daemon(f"slurmd.{dead}")
    assert (first["blamed"], first["lost_steps"]) == ([dead], 0)
    assert (second["job_id"], second["restart"], second["hosts"]) == (first["job_id"], 0, [shell])
    assert second["world_size"] == 1 and second["start"] - died_at < SOON_S
    steps = [line["step"] for line in fingerprint(fragile.run("range"))["metrics"] if "loss" in line]
    assert steps == list(range(1, 121)), "each step once"


def test_a_blamed_node_is_excluded(fragile: User) -> None:
    """A rank is killed as often as a node may be blamed: the run leaves that node, in its allocation, after a requeue,
    and in the job that a resume would submit. tests/job/test_nodes.py has nodes that may be blamed more often."""
    fragile.types(*SPARE, "--name", "blamed", *UNHURRIED, "train.max_steps=1000", "launch.exclude_after=1")
    shell, bad = trains(fragile, "blamed", 0)
    fragile.kills("blamed", 1)
    again, spare = trains(fragile, "blamed", 1)
    assert again == shell and spare not in (shell, bad)
    job = fragile.job_of("blamed")
    fragile.cluster.run("scontrol", "requeue", job)
    assert bad not in trains(fragile, "blamed", 2)
    assert f"ExcNodeList={bad} " in fragile.cluster.run("scontrol", "show", "job", "--oneliner", job)
    assert f"{bad}, blamed for 1 fault" in fragile.types("status", "blamed")
    fragile.types("cancel", "blamed")
    fragile.waits_until_gone(job)
    assert f"#SBATCH --exclude={bad}\n" in fragile.types("resume", "blamed", "--dry-run")


def test_the_node_of_the_batch_shell_dies(fragile: User) -> None:
    """Nothing is left that could restart the ranks here, and Slurm would keep the rest of the job forever: a rank that
    survived has the job requeued."""
    fragile.types(*SPARE, "--name", "shell", *UNHURRIED)
    fragile.waits_for("shell", IN_EPOCH_2)
    shell, _ = trains(fragile, "shell", 0)
    fragile.kills_node(shell)
    (first,) = fragile.waits_for_end("shell", "failed")
    assert first["blamed"] == [shell]
    fragile.waits_for("shell", "requeued job")
    fragile.cluster.start_daemon(f"slurmd.{shell}")
    trains(fragile, "shell", 1)
    (again,) = read_lines(fragile.run("shell").attempt_now)
    assert (again["job_id"], again["restart"], again["start_step"]) == (first["job_id"], 1, first["end_step"])
    fragile.types("cancel", "shell")

"""A fault on a real Slurm does not cost the allocation: the ranks start again in the same job, without a requeue."""

from __future__ import annotations

from typing import Any

from tests.slurm.launchers import IN_EPOCH_2, UNHURRIED
from tests.slurm.user import User
from tests.support.ranks import fingerprint
from tests.support.undisturbed import undisturbed_run
from tests.support.waiting import DEADLINE_S
from trainer.config.config import Config

FOUR_RANKS = ("--nodes", "2", "--tasks-per-node", "2")


def undisturbed(ranks: int) -> dict[str, Any]:
    """The fingerprint of an undisturbed run, on one host."""
    return undisturbed_run(Config.load("mnist", [*UNHURRIED, f"launch.tasks_per_node={ranks}"]))


def restarts_of(user: User, name: str) -> int:
    """How often Slurm has requeued the run's job; it remembers an ended job for minutes."""
    shown = user.cluster.run("scontrol", "show", "job", "--oneliner", user.job_of(name))
    return int(dict(word.split("=", 1) for word in shown.split() if "=" in word)["Restarts"])


def test_a_killed_rank(user: User) -> None:
    """As when a node runs out of memory. The job never leaves its nodes: no queue, no lost step, the same bits. In
    Python its result is that of the whole run."""
    following = user.begins(*FOUR_RANKS, "--name", "kept", "--follow", *UNHURRIED)
    user.waits_for("kept", IN_EPOCH_2)
    user.kills("kept", 3)
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert "resuming after step" in said, "--follow streams through the restart"
    first, second = user.attempts("kept")
    assert (first["reason"], second["reason"]) == ("failed", "finished")
    assert (first["restart"], second["restart"], restarts_of(user, "kept")) == (0, 0, 0), "the job was requeued"
    assert (first["step_id"], second["step_id"]) == (0, 1)
    assert first["hosts"] == second["hosts"] and first["job_id"] == second["job_id"]
    assert first["lost_steps"] == 0 and second["start_step"] == first["end_step"] >= 50
    user.waits_until_gone(user.job_of("kept"))
    assert fingerprint(user.run("kept")) == undisturbed_run(
        Config.load("mnist", [*UNHURRIED, "launch.tasks_per_node=4"])
    )

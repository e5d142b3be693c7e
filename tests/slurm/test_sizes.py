"""A run on a range of nodes takes as many as a real Slurm has free at each start."""

from __future__ import annotations

from pathlib import Path

from laststep.config.config import Config
from laststep.data.order import Order
from tests.slurm.user import User
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint
from tests.support.runs import check_samples, undisturbed_run

STEPS = 160  # 8 an epoch, of 60 ms on four nodes, hardly any of it CPU time
TASK = (
    "task=tests.support.tasks.RecordedUnhurried", "data.name=fake", "data.args.samples=96", "data.args.image_size=8",
    "train.batch_size=12", f"train.epochs={STEPS // 8}", "train.log_every=5",
)  # fmt: skip


def occupies(user: User, partition: str, nodes: str, seconds: int) -> str:
    """Give all of these nodes to another job; returns its id."""
    words = ("--parsable", f"--nodelist={nodes}", "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds}")
    job = user.cluster.run("sbatch", f"--partition={partition}", *words).strip()
    running = lambda: user.cluster.run("squeue", "--noheader", "--states=R", f"--jobs={job}")  # noqa: E731
    user.cluster.wait_for(running, DEADLINE_S, f"job {job} did not get {nodes}")
    return job


def test_one_four_two_nodes(user: User, tmp_path: Path) -> None:
    """A run that would wait for hours for four nodes begins on one. Requeued when the others are free, it gets all
    four. Preempted from two of them, it continues on the other two. launch.setup runs on each node that it gets."""
    notes, prepared = tmp_path / "notes", tmp_path / "prepared"
    other = occupies(user, "main", "n[2-4]", 600)
    options = (f"launch.env.LASTSTEP_TEST_NOTES={notes}", f"launch.setup=['echo $SLURMD_NODENAME >> {prepared}']")
    said = user.types("--nodes", "1-4", "--name", "range", *TASK, *options)
    job = user.job_of("range")
    assert f"job    {job}: 1-4 nodes x 1 rank" in said
    user.waits_for("range", "attempt begins")
    user.cluster.run("scancel", other)
    user.waits_for("range", f"step 10/{STEPS}")
    user.cluster.run("scontrol", "requeue", job)
    user.waits_for("range", f"step 50/{STEPS}")
    other = occupies(user, "high", "n[3-4]", 600)
    user.waits_for_end("range", "finished")
    user.cluster.run("scancel", other)

    attempts = user.attempts("range")
    assert [(end["job_id"], end["restart"]) for end in attempts] == [(job, restart) for restart in range(3)]
    assert [(end["world_size"], end["reason"], end["lost_steps"]) for end in attempts] == [
        (1, "preempted", 0), (4, "preempted", 0), (2, "finished", 0)
    ]  # fmt: skip
    check_samples(notes, Order(96, 12, seed=0), STEPS)
    nodes = prepared.read_text().split()
    assert nodes[0] == "n1" and sorted(nodes[1:5]) == ["n1", "n2", "n3", "n4"] and sorted(nodes[5:]) == ["n1", "n2"]


def test_the_same_bits_on_any_number_of_nodes(user: User) -> None:
    """A run in four shares gets three nodes, of which two can divide the shares. Preempted, it comes back on one. It
    ends with the weights and metrics of a run that one node has trained undisturbed."""
    words = (
        "data.name=fake", "data.args.samples=96", "data.args.image_size=8", "data.args.augment=true",
        "train.batch_size=16", "train.shares=4", "train.epochs=5", "train.log_every=5", "optim.lr=0.02",
    )  # fmt: skip
    other = occupies(user, "main", "n4", 600)
    user.types("--nodes", "1-4", "--name", "shares", "task=tests.support.tasks.Unhurried", *words)
    user.waits_for("shares", "train.shares: training on 2 of 3 nodes")
    user.waits_for("shares", "step 10/30")
    user.cluster.run("scancel", other)
    other = occupies(user, "high", "n[2-4]", 600)
    user.waits_for_end("shares", "finished")
    user.cluster.run("scancel", other)

    ends = [(end["world_size"], end["reason"], end["lost_steps"]) for end in user.attempts("shares")]
    assert ends == [(2, "preempted", 0), (1, "finished", 0)]
    assert fingerprint(user.run("shares")) == undisturbed_run(Config.load("mnist", [*words, "device=cpu"]))

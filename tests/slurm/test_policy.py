"""Attempts that end by force or by mistake on a real Slurm, and whether the run then continues by itself.

An unattended run must recover from a passing fault, and must not waste a cluster's hours on a permanent one.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from laststep.config.config import Config
from laststep.records.metrics import read_lines
from tests.slurm.cluster import Cluster
from tests.slurm.launchers import IN_EPOCH_2, SMALL, UNHURRIED
from tests.slurm.user import User
from tests.support.project import DEADLINE_S, PROJECT, wait_until
from tests.support.ranks import fingerprint
from tests.support.runs import undisturbed_run

TWO_RANKS = ("--nodes", "2", *UNHURRIED)


def comes_back(user: User, name: str, words: Sequence[str] = UNHURRIED) -> dict[str, Any]:
    """Check that the run ends like an undisturbed one, after one attempt that ended early, in the same job; returns
    that attempt."""
    user.waits_for_end(name, "finished")
    first, second = user.attempts(name)
    assert (first["job_id"], second["job_id"]) == (user.job_of(name), user.job_of(name))
    assert first["requeue"] and first["end_step"] - first["lost_steps"] == second["start_step"]
    assert fingerprint(user.run(name)) == undisturbed_run(Config.load("mnist", [*words, "launch.nodes=2"]))
    return first


def test_every_rank_is_killed(plain: User) -> None:
    """After SIGKILL of all ranks only the batch shell is left to record the end and to request a requeue."""
    following = plain.begins(*TWO_RANKS, "--name", "killed", "--follow", "launch.max_restarts=0")
    metrics = plain.run("killed").metrics
    wait_until(lambda: any(line["step"] >= 45 for line in read_lines(metrics)), "step 45 is not in metrics.jsonl")
    plain.kills("killed", 0, 1)
    (lost,) = plain.waits_for_end("killed", "lost")
    assert lost["end_step"] - lost["lost_steps"] == 40, "known from metrics.jsonl, but for the last 0.1 s"
    assert lost["end_step"] >= 45 and lost["lost_s"] > 0
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0 and "the attempt ended (lost), the run continues" in said
    assert "resuming after step 40" in said, "--follow streams through the requeue"
    comes_back(plain, "killed")


def test_python_is_gone(cluster: Cluster, tmp_path: Path) -> None:
    """The mount that has Python goes bad, so the batch shell cannot ask what follows. It requeues the job all the same,
    and leaves its node; the next start, where Python is, records the attempt as lost and finishes the run."""
    prefix = Path(sys.prefix)
    (tmp_path / "bin").mkdir()
    for name in ("lib", "lib64", "pyvenv.cfg"):
        (tmp_path / name).symlink_to(prefix / name)
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    python = tmp_path / "bin" / "python"
    python.symlink_to(tmp_path / "python")
    user = User(cluster, tmp_path / "runs", str(python))
    user.types(*TWO_RANKS, "--name", "mount")
    user.waits_for("mount", IN_EPOCH_2)
    python.unlink()
    user.kills("mount", 0, 1)
    job = user.job_of("mount")
    user.waits_for("mount", f"requeueing job {job}: Python does not start on n")

    def left() -> list[str]:
        return re.findall(r"ExcNodeList=(n\d)\s", cluster.run("scontrol", "show", "job", job))

    (node,) = wait_until(left, "the job does not leave the node")
    assert "laststep-unrecorded:1@0" in cluster.run("scontrol", "show", "job", job)
    python.symlink_to(tmp_path / "python")
    lost = comes_back(user, "mount")
    assert lost["reason"] == "lost" and lost["hosts"][0] == node not in user.attempts("mount")[1]["hosts"]


def test_srun_is_killed(plain: User) -> None:
    """Without srun the ranks continue until the batch shell ends and Slurm kills them. Requeued before that, they
    receive the SIGTERM of any requeue, and lose no step."""
    plain.types(*TWO_RANKS, "--name", "srun")
    plain.waits_for("srun", IN_EPOCH_2)
    plain.kills_srun("srun")
    first = comes_back(plain, "srun")
    assert (first["reason"], first["lost_steps"]) == ("preempted", 0)


def test_a_rank_fails_once(user: User) -> None:
    """An attempt that fails after it has kept steps is followed by another, which may get past that place. In Python
    the job's result is that of the whole run, not the failure."""
    small = (*SMALL, "train.epochs=2")
    words = [*small, "launch.nodes=2", "launch.name=fails", "task=tests.support.tasks.FailsOnce"]
    program = (
        "from laststep import Config, submit\n"
        f"job = submit(Config.load('mnist', {[*words, f'launch.root={user.root}']!r}, {user.site!r}))\n"
        "print(job.result()['step'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, env=user.env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    # Without accounting submitit's warnings about sacct come first.
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["14"]), done.stderr
    first = comes_back(user, "fails", small)
    assert first["reason"] == "failed" and "ValueError: a bad sample" in first["error"]


def test_a_rank_fails_always_at_the_same_place(user: User) -> None:
    """The same error at the same line and step a second time is a bug: the run ends and says so, whatever is left of
    the budgets. A third attempt would cost an allocation and tell nothing new."""
    options = ("--name", "bug", "task=tests.support.tasks.Broken", "launch.max_failures=9", "launch.max_restarts=0")
    following = user.begins(*TWO_RANKS, "--follow", *options)
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 1 and "the run ended: failed" in said
    assert [(end["reason"], end["requeue"]) for end in user.attempts("bug")] == [("failed", True), ("failed", False)]
    user.waits_until_gone(user.job_of("bug"))
    user.waits_for("bug", "not requeued: the attempt ended (failed): the same error a second time, after step ")


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of another cluster, whose daemons are killed. A node that is silent for 10 s is DOWN."""
    cluster = Cluster.start(
        tmp_path_factory.mktemp("fragile"), slurmd_timeout_s=10, accounting=False, owner=os.getpid()
    )
    yield User(cluster, tmp_path_factory.mktemp("runs"))
    cluster.stop()


def test_the_controller_is_away(fragile: User) -> None:
    """No job can be requeued while slurmctld restarts. The run must survive that, although every rank was killed: only
    the batch shell is left to record the end and to request a requeue."""
    # slurmctld saves its state every 5 s. It would not know a younger job, start it a second time, and drain the node
    # where it finds the first one: a fault of Slurm's own, which is not tested here.
    fragile.types(*TWO_RANKS, "--name", "away", "launch.setup=['sleep 6']", "launch.max_restarts=0")
    fragile.waits_for("away", IN_EPOCH_2)
    fragile.cluster.stop_daemon("slurmctld", signal.SIGKILL)
    fragile.kills("away", 0, 1)
    version = re.search(r"(\d+)\.(\d+)", fragile.cluster.run("slurmctld", "-V"))
    # From 26.05 on a node reports to srun only after slurmctld has its report, which it repeats every minute.
    if version and tuple(map(int, version.groups())) < (26, 5):
        fragile.waits_for("away", "Killed")
    fragile.cluster.start_daemon("slurmctld")
    lost = comes_back(fragile, "away")
    assert lost["reason"] == "lost" and lost["lost_s"] > 0
    assert lost["end_step"] - lost["lost_steps"] in (40, 80), "known from metrics.jsonl; each epoch's end is saved"


def test_a_node_dies(fragile: User) -> None:
    """A node loses its slurmd and its rank; the run continues on the nodes that are left."""
    fragile.types(*TWO_RANKS, "--name", "node")
    fragile.waits_for("node", IN_EPOCH_2)
    node = fragile.cluster.run("squeue", "-h", "-j", fragile.job_of("node"), "-O", "NodeList:.20").strip()
    assert node == "n[1-2]"
    fragile.kills_node("n2")
    comes_back(fragile, "node")


def test_a_node_is_soon_back(fragile: User) -> None:
    """A node loses its slurmd and its rank, and is back before Slurm has noticed. srun would wait for that rank without
    end, and the next one for the CPUs that the old step still seems to have."""
    fragile.types(*TWO_RANKS, "--name", "back")
    fragile.waits_for("back", IN_EPOCH_2)
    job = fragile.job_of("back")
    nodes = fragile.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    _, other = fragile.cluster.run("scontrol", "show", "hostnames", nodes).split()
    fragile.kills_node(other)
    fragile.waits_for("back", "attempt ended (failed)")  # srun would kill the other rank if slurmd were back already
    fragile.cluster.start_daemon(f"slurmd.{other}")
    first = comes_back(fragile, "back")
    assert (first["reason"], first["lost_steps"], first["blamed"]) == ("failed", 0, [other])


def test_a_finished_run_is_started_again(user: User) -> None:
    """Slurm 24.11 starts a job once more after its run has finished, if it was preempted and requeued before; here an
    administrator does. The second start ends at once and changes nothing."""
    user.types("--nodes", "2", "--name", "again", "--follow", *SMALL, "train.max_steps=2")
    run, job = user.run("again"), user.job_of("again")
    before = [path.read_bytes() for path in (run.attempts, run.metrics)]
    user.waits_until_gone(job)
    user.cluster.run("scontrol", "requeue", job)
    user.waits_for("again", "finished at 2 of 2", times=2)
    user.waits_until_gone(job)
    assert [path.read_bytes() for path in (run.attempts, run.metrics)] == before
    assert "JobState=COMPLETED" in user.cluster.run("scontrol", "show", "job", job)
    for rank in range(2):
        outcome, result = pickle.loads((run.logs / f"{job}_{rank}_result.pkl").read_bytes())
        assert outcome == "success" and "val_loss" in result
    assert "finished" in user.types("status", "again")


def test_nodes_that_have_no_scontrol(user: User, tmp_path: Path) -> None:
    """Neither a rank nor the batch shell can requeue the job: a watcher on the login node continues the run."""
    for program in ("srun", "bash", "sh", "timeout", "env"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    words = ("task=tests.support.tasks.AwaitsStop", *SMALL, "train.epochs=2")
    user.types("--name", "bare", f"launch.setup=['export PATH={tmp_path}']", *words)
    watcher = user.begins("resume", "bare", "--watch")
    user.waits_for("bare", "holds in its step 8")
    user.cluster.run("scancel", "--signal=USR2", user.job_of("bare"))
    said, _ = watcher.communicate(timeout=DEADLINE_S)
    assert watcher.returncode == 0, said
    first, second = user.attempts("bare")
    assert (first["reason"], first["lost_steps"], second["reason"]) == ("preempted", 0, "finished")
    assert first["job_id"] != second["job_id"] and first["end_step"] == second["start_step"] == 8
    user.waits_for("bare", "not requeued: Slurm does not answer on this node")

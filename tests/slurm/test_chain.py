"""Chains of jobs, on a Slurm that forbids requeueing: each job takes over where the one before stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.launchers import IN_EPOCH_2, UNHURRIED
from tests.slurm.test_requeue import SHORT, TWO_RANKS, WAITS, undisturbed
from tests.slurm.user import User
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint

REFUSES = """\
#!/bin/sh
echo "$*" >>{calls}
case "$*" in {what}*) echo "Access/permission denied" >&2; exit 1;; esac
exec {real} "$@"
"""


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> User:
    """A user who may not requeue, as on sites that forbid it."""
    user = User(cluster, tmp_path / "runs")
    refuses(user, "scontrol", "requeue")
    return user


def refuses(user: User, program: str, what: str) -> Path:
    """From now on Slurm refuses this command to the user and to their jobs; returns the file that notes each call."""
    folder = user.root / "refusing"
    folder.mkdir(exist_ok=True)
    calls = folder / f"{program}.calls"
    real = shutil.which(program, path=user.cluster.env["PATH"])
    (folder / program).write_text(REFUSES.format(calls=calls, what=what, real=real))
    (folder / program).chmod(0o755)
    user.env["PATH"] = f"{folder}:{user.cluster.env['PATH']}"
    return calls


def chain_of(user: User, name: str) -> list[str]:
    """The ids of the run's jobs, in their order."""
    logs = user.run(name).logs
    return sorted((path.name.split("_")[0] for path in logs.glob("*_submitted.pkl")), key=int)


def ends(user: User, name: str) -> list[tuple[str, str, int]]:
    """How the attempts of a run have ended: reason, job and lost steps."""
    return [(end["reason"], end["job_id"], end["lost_steps"]) for end in user.attempts(name)]


def waits_for_empty_queue(user: User, name: str) -> None:
    """Wait until no job of the run is in the queue."""
    for job in chain_of(user, name):
        user.waits_until_gone(job)


def test_stopped(user: User) -> None:
    """What a time limit or a preemption does: the next job continues, nobody has asked for a requeue, and once the run
    has finished nothing is left in the queue."""
    following = user.begins(*TWO_RANKS, "--name", "chained", "--follow", *WAITS, "launch.chain=3")
    user.waits_for("chained", "holds in its step 8", times=2)
    first, second, third = chain_of(user, "chained")
    assert user.cluster.run("squeue", "-h", "-j", f"{second},{third}", "-o", "%r").split() == ["Dependency"] * 2
    user.cluster.run("scancel", "--signal", "USR2", first)
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert "resuming after step" in said, "--follow goes on in the log of the next job"
    assert "the next job of the chain continues the run" in said and "not requeued" not in said, said
    assert ends(user, "chained") == [("preempted", first, 0), ("finished", second, 0)]
    assert fingerprint(user.run("chained")) == undisturbed(2, *WAITS)
    waits_for_empty_queue(user, "chained")
    assert "requeue" not in (user.root / "refusing" / "scontrol.calls").read_text()


def test_as_deep_as_it_was(user: User) -> None:
    """Each job that begins submits one at the end of the chain, so that a run may take any number of them."""
    user.types(*TWO_RANKS, "--name", "deep", *UNHURRIED, "launch.chain=2")
    user.waits_for("deep", "step ")
    first = chain_of(user, "deep")[0]
    user.cluster.run("scancel", "--signal", "USR2", first)
    user.waits("deep", lambda: len(chain_of(user, "deep")) == 3, "has no third job")
    assert "2 nodes x 1 rank" not in user.types("status", "deep"), "a status, not a submission"
    user.types("cancel", "deep")
    assert [reason for reason, _, _ in ends(user, "deep")][-1] == "cancelled"
    waits_for_empty_queue(user, "deep")


def test_cancelled(user: User) -> None:
    """cancel ends the whole chain, and resume begins another."""
    user.types(*TWO_RANKS, "--name", "cancelled", *UNHURRIED, "launch.chain=3")
    user.waits_for("cancelled", IN_EPOCH_2)
    said = user.types("resume", "cancelled", status=2)
    assert "of this run is in the queue" in said
    jobs = chain_of(user, "cancelled")
    user.types("cancel", "cancelled")
    waits_for_empty_queue(user, "cancelled")
    assert ends(user, "cancelled") == [("cancelled", jobs[0], 0)]
    assert "cancelled" in user.types("status", "cancelled")
    user.types("resume", "cancelled", "--follow")
    again = chain_of(user, "cancelled")
    assert len(again) == 6 and ends(user, "cancelled")[1:] == [("finished", again[3], 0)]
    assert fingerprint(user.run("cancelled")) == undisturbed(2, *UNHURRIED)
    waits_for_empty_queue(user, "cancelled")


def test_nothing_left_to_do(user: User) -> None:
    """A job that could not be cancelled leaves before it starts a rank: its nodes are somebody else's."""
    refuses(user, "scancel", "")
    user.types(*TWO_RANKS, "--name", "short", SHORT, "launch.chain=2", "--follow")
    waits_for_empty_queue(user, "short")
    (attempt,) = user.attempts("short")
    _, second = chain_of(user, "short")
    log = (user.run("short").logs / f"{second}_0_log.out").read_text()
    assert attempt["reason"] == "finished" and "so this job of its chain leaves" in log
    assert "attempt begins" not in log


def test_budget(user: User) -> None:
    """A run that fails again and again ends, as with requeues: the budget counts over the jobs of the chain."""
    words = ("task=tests.support.tasks.Broken", "launch.max_failures=1", "launch.max_restarts=0", "launch.chain=2")
    said = user.begins(*TWO_RANKS, "--name", "fails", "--follow", *words).communicate(timeout=DEADLINE_S)[0]
    assert "a bad sample" in said.splitlines()[-4], said
    first, second = chain_of(user, "fails")[:2]
    assert ends(user, "fails") == [("failed", first, 0), ("failed", second, 0)]
    waits_for_empty_queue(user, "fails")

"""Chains of jobs, on a Slurm that forbids requeueing: each job takes over where the one before stopped."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from laststep.records.metrics import newest_step
from tests.slurm.cluster import Cluster, missing
from tests.slurm.launchers import UNHURRIED
from tests.slurm.test_requeue import SHORT, TWO_RANKS, WAITS, undisturbed
from tests.slurm.user import User
from tests.support.needs import require
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint

REFUSES = """\
#!/bin/sh
echo "$*" >>{calls}
case "$*" in {what}*) {where} && echo "Access/permission denied" >&2 && exit 1;; esac
exec {real} "$@"
"""


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> User:
    """A user who may not requeue, as on sites that forbid it."""
    user = User(cluster, tmp_path / "runs")
    refuses(user, "scontrol", "requeue")
    return user


def refuses(user: User, program: str, what: str, where: str = "true") -> Path:
    """From now on Slurm refuses this command to the user and to their jobs, where this shell command succeeds; returns
    the file that notes each call."""
    folder = user.root / "refusing"
    folder.mkdir(exist_ok=True)
    calls = folder / f"{program}.calls"
    real = shutil.which(program, path=user.cluster.env["PATH"])
    (folder / program).write_text(REFUSES.format(calls=calls, what=what, where=where, real=real))
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
    """Slurm's own time limit ends the first job: the next one continues and submits another, so that the chain is as
    long as it was. Nobody has asked for a requeue, and once the run has finished nothing is left in the queue.

    Slurm looks every 30 s, so that its warning may come up to 30 s early; the ranks wait for it.
    """
    limit = ("launch.time_min=1", "launch.signal_delay_s=10")
    following = user.begins(*TWO_RANKS, "--name", "chained", "--follow", *WAITS, "launch.chain=3", *limit)
    user.waits_for("chained", "holds in its step 8", times=2)
    first, second, third = chain_of(user, "chained")
    assert user.cluster.run("squeue", "-h", "-j", f"{second},{third}", "-o", "%r").split() == ["Dependency"] * 2
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert "resuming after step" in said, "--follow goes on in the log of the next job"
    log = (user.run("chained").logs / f"{first}_0_log.out").read_text()
    assert f"job {second} of the chain continues the run" in log and "not requeued" not in said + log, log
    assert ends(user, "chained") == [("timeout", first, 0), ("finished", second, 0)]
    assert fingerprint(user.run("chained")) == undisturbed(2, *WAITS)
    waits_for_empty_queue(user, "chained")
    assert "requeue" not in (user.root / "refusing" / "scontrol.calls").read_text()
    assert len(chain_of(user, "chained")) == 4, "the second job has submitted one"


def test_as_deep_as_it_was(user: User) -> None:
    """Each job that begins submits one at the end of the chain, so that a run may take any number of them."""
    user.types(*TWO_RANKS, "--name", "deep", *UNHURRIED, "launch.chain=2")
    user.waits_for("deep", "step 10/120")
    first = chain_of(user, "deep")[0]
    user.cluster.run("scancel", "--signal", "USR2", first)
    user.waits("deep", lambda: len(chain_of(user, "deep")) == 3, "has no third job")
    assert "2 nodes x 1 rank" not in user.types("status", "deep"), "a status, not a submission"
    user.types("cancel", "deep")
    assert [reason for reason, _, _ in ends(user, "deep")][-1] == "cancelled"
    waits_for_empty_queue(user, "deep")


def test_nodes_that_may_not_submit(user: User) -> None:
    """Where a site forbids sbatch on its compute nodes, the jobs in the queue are all that the run gets: the log says
    whether they are enough, and in the end with which command it goes on."""
    in_jobs = user.root / "refuses_in_jobs"
    refuses(user, "sbatch", "", where=f"[ -e {in_jobs} ]")
    user.types(*TWO_RANKS, "--name", "alone", *UNHURRIED, "launch.chain=2", "launch.time_min=10")
    in_jobs.touch()
    user.waits_for("alone", "step 10/120")
    first, second = chain_of(user, "alone")
    user.cluster.run("scancel", "--signal", "USR2", first)
    user.waits_for("alone", "resuming after step")
    user.cluster.run("scancel", "--signal", "USR2", second)
    waits_for_empty_queue(user, "alone")
    log = (user.run("alone").logs / f"{second}_0_log.out").read_text()
    assert "1 job of the chain not submitted now" in log and "Access/permission denied" in log, log
    resume = rf"`\S+ .*resume {user.run('alone').path}`"
    assert re.search(rf"0 jobs of the chain left, 1 needed for the \d+ steps left at [\d,]+ a job; {resume}", log), log
    assert re.search(rf"no job of the chain is left \(launch.chain=2\); {resume} continues the run", log), log
    assert "of the chain continues" not in log, "nothing that the next line takes back"
    assert [reason for reason, _, _ in ends(user, "alone")] == ["preempted", "preempted"]


def test_cancelled(user: User) -> None:
    """cancel ends the whole chain, and resume begins another."""
    user.types(*TWO_RANKS, "--name", "cancelled", *WAITS, "launch.chain=3")
    user.waits_for("cancelled", "holds in its step 8", times=2)
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
    assert fingerprint(user.run("cancelled")) == undisturbed(2, *WAITS)
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


# On two nodes 80 ms a step, as UNHURRIED; the same bits as the plain task, which does not wait for its samples.
MINUTE = (*UNHURRIED[1:], "train.epochs=1000", "launch.time_min=1", "launch.signal_delay_s=15", "launch.chain=3")
SLOWLY, PLAINLY = UNHURRIED[0], "task=classification"


def test_a_job_may_last_a_minute(user: User) -> None:
    """A training of more than a minute, where no job may last longer and none is requeued: as a user types it, with
    nobody who watches."""
    steps = "train.max_steps=700"
    user.types(*TWO_RANKS, "--name", "minute", SLOWLY, *MINUTE, steps)
    user.cluster.wait_for(lambda: is_over(user, "minute"), 6 * 60, "minute did not finish")
    found = ends(user, "minute")
    assert len(found) >= 2 and {reason for reason, *_ in found[:-1]} == {"timeout"}, found
    assert [lost for *_, lost in found] == [0] * len(found)
    assert len({job for _, job, _ in found}) == len(found), "each attempt in a job of its own"
    assert fingerprint(user.run("minute")) == undisturbed(2, PLAINLY, *MINUTE, steps)
    waits_for_empty_queue(user, "minute")


def is_over(user: User, name: str) -> bool:
    """Whether the run has finished, or has ended otherwise."""
    return bool((found := user.attempts(name)) and not found[-1]["requeue"])


def step_of(user: User, name: str) -> int:
    """The newest step of the run."""
    newest = newest_step(user.run(name).metrics)
    return newest["step"] if newest else 0


def kills_one(user: User, sweep: str) -> bool:
    """Kill rank 1 of a run of the sweep, unless all are between two jobs just now."""
    with contextlib.suppress(KeyError, ProcessLookupError):
        user.kills(sweep, 1)
        return True
    return False


def test_six_minutes_where_a_job_may_last_one(tmp_path: Path) -> None:
    """The whole day of such a site at once: four runs of six minutes in a sweep, a killed rank, a node that dies under
    them, and a preemption of all. Nothing is lost, nothing is left in the queue, and all have the bits of undisturbed
    runs."""
    require(missing())
    faulthandler.cancel_dump_traceback_later()  # pytest's of 400 s; each wait here has its own
    cluster = Cluster.start(tmp_path / "slurm", slurmd_timeout_s=20, accounting=False, owner=os.getpid())
    try:
        user = User(cluster, tmp_path / "runs")
        refuses(user, "scontrol", "requeue")
        steps = "train.max_steps=4500"
        user.types("sweep", *TWO_RANKS, "--name", "day", SLOWLY, *MINUTE, steps, "seed=0..3")
        names = [f"day-seed_{seed}" for seed in range(4)]
        for name in names:
            begun = lambda name=name: step_of(user, name) >= 600  # noqa: E731
            cluster.wait_for(begun, 10 * 60, f"{name} has not done 600 steps")
        cluster.wait_for(lambda: kills_one(user, "day"), 120, "no rank 1 is up")
        nodes = lambda: re.findall(r"n\[\d[-,](\d)\]", cluster.run("squeue", "-h", "-t", "R", "-o", "%N"))  # noqa: E731
        dead = cluster.wait_for(nodes, 120, "no job runs on two nodes")[0]
        user.kills_node(f"n{dead}")
        time.sleep(60)  # Slurm has noticed, and the others go on
        cluster.start_daemon(f"slurmd.n{dead}")
        cluster.run("sbatch", "-p", "high", "-N4", "-c8", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 20")
        for name in names:
            cluster.wait_for(lambda name=name: is_over(user, name), 45 * 60, f"{name} did not finish")  # type: ignore
        for name in names:
            found = ends(user, name)
            assert (found[-1][0], sum(lost for *_, lost in found)) == ("finished", 0), found
            assert fingerprint(user.run(name)) == undisturbed(2, PLAINLY, *MINUTE, steps, f"seed={name[-1]}")
        cluster.wait_for(lambda: not cluster.run("squeue", "-h"), 60, "something is left in the queue")
        print({name: ends(user, name) for name in names})
    finally:
        cluster.stop()


def test_budget(user: User) -> None:
    """A run that fails again and again ends, as with requeues: the budget counts over the jobs of the chain."""
    words = ("task=tests.support.tasks.Broken", "launch.max_failures=1", "launch.max_restarts=0", "launch.chain=2")
    said = user.begins(*TWO_RANKS, "--name", "fails", "--follow", *words).communicate(timeout=DEADLINE_S)[0]
    assert "a bad sample" in said.splitlines()[-4], said
    first, second = chain_of(user, "fails")[:2]
    assert ends(user, "fails") == [("failed", first, 0), ("failed", second, 0)]
    waits_for_empty_queue(user, "fails")

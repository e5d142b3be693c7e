"""Whatever ends an allocation on a real Slurm, the next attempt continues, and the model is bit for bit the same.

Each test interrupts a run on two nodes in its second epoch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from laststep.config.config import Config
from laststep.ranks.slurm import can_expedite
from laststep.records.metrics import read_lines
from tests.faults.slurm_day import Day, Target
from tests.slurm.cluster import SLURM_CONF, Cluster, missing
from tests.slurm.launchers import IN_EPOCH_2, SMALL, UNHURRIED
from tests.slurm.user import User
from tests.support.needs import require
from tests.support.project import DEADLINE_S
from tests.support.ranks import fingerprint
from tests.support.runs import undisturbed_run

TWO_RANKS = ("--nodes", "2")
FOUR_RANKS = ("--nodes", "2", "--tasks-per-node", "2")
# 7 steps an epoch. Every rank waits in step 8 of an attempt until a signal stops it.
WAITS = (*SMALL, "train.epochs=2", "task=tests.support.tasks.AwaitsStop")
SHORT = "train.max_steps=20"
CRED_EXPIRE_S = 5  # of slurm.conf; so long Slurm holds a requeued job


def undisturbed(ranks: int, *words: str) -> dict[str, Any]:
    """The fingerprint of an undisturbed run, on one host."""
    return undisturbed_run(Config.load("mnist", [*words, f"launch.tasks_per_node={ranks}"]))


def test_four_ranks_on_two_nodes(user: User) -> None:
    """The first command in README: every rank is one task, and everything about the run is in its folder."""
    said = user.types(*FOUR_RANKS, "--name", "undisturbed", "--follow", SHORT)
    assert "step 20/20" in said, "--follow streams rank 0's log to the end"
    assert "requeued" not in said, "the queue was asked before the job started; it was never requeued"
    assert "submitit INFO" not in said and "srun:" not in said, said
    found = fingerprint(user.run("undisturbed"))
    assert found == undisturbed(4, SHORT)
    (attempt,) = user.attempts("undisturbed")
    assert attempt["reason"] == "finished"
    assert attempt["world_size"] == 4 and len(attempt["hosts"]) == 2
    config = Config.load(user.run("undisturbed").config)
    assert config.launch.grace_s == 15, "the cluster's KillWait"
    job = user.job_of("undisturbed")
    logs = sorted(path.name for path in user.run("undisturbed").logs.glob("*_log.out"))
    assert logs == [f"{job}_{rank}_log.out" for rank in range(4)]
    steps = [line["step"] for line in found["metrics"] if "loss" in line]
    assert steps == list(range(1, 21)), "each step is in metrics.jsonl once, in order"
    newest = user.verify("undisturbed")[-1]
    assert newest["ok"] and newest["step"] == 20 and newest["world_size"] == 4


def hit_and_compare(user: User, name: str, fault: tuple[str, ...], *more: str) -> None:
    """Follow a run, interrupt it in step 8 with a Slurm command, and compare its result with an undisturbed run's."""
    following = user.begins(*TWO_RANKS, "--name", name, "--follow", *WAITS, *more)
    user.waits_for(name, "holds in its step 8", times=2)
    job = user.job_of(name)
    user.cluster.run(*(word.format(job=job) for word in fault))
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert "resuming after step" in said, "--follow streams through the requeue"

    first, second = user.attempts(name)
    assert (first["reason"], second["reason"]) == ("preempted", "finished")
    assert (first["job_id"], second["job_id"]) == (job, job), "the same job, started again"
    assert (first["restart"], second["restart"]) == (0, 1)
    assert first["lost_steps"] == second["lost_steps"] == 0
    assert first["end_step"] == second["start_step"] == 8
    assert fingerprint(user.run(name)) == undisturbed(2, *WAITS)


def test_scontrol_requeue(user: User, tmp_path: Path) -> None:
    """An administrator's requeue sends SIGTERM, which submitit ignores: its plain job would start from nothing. Whoever
    asked for alerts hears of it once, and once of the end."""
    told = tmp_path / "told"
    alerts = ("alert.when=[requeued,finished,failed]", f"alert.to=['cat >> {told}']")
    hit_and_compare(user, "requeue", ("scontrol", "requeue", "{job}"), *alerts, "telemetry.record=always")
    titles = [line for line in told.read_text().splitlines() if line in ("requeue is requeued", "requeue finished")]
    assert titles == ["requeue is requeued", "requeue finished"], told.read_text()


def test_suspended(plain: User) -> None:
    """As PreemptMode=SUSPEND and gang scheduling do, for longer than any timeout of the run: it trains on, as if
    nothing had been. It used to die as it woke, without a rescue."""
    words = ("--name", "suspended", "--follow", *TWO_RANKS, *UNHURRIED, "launch.hang_timeout_s=6")
    following = plain.begins(*words)
    plain.waits_for("suspended", IN_EPOCH_2)
    job = plain.job_of("suspended")
    plain.cluster.run("scontrol", "suspend", job)
    time.sleep(15)  # what a clock would count, more than twice the timeout
    (shown,) = json.loads(plain.types("status", "suspended", "--json"))
    plain.cluster.run("scontrol", "resume", job)
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert shown["state"] == "running", "its ranks are there, and keep their nodes"
    ends = [(end["reason"], end["lost_steps"]) for end in plain.attempts("suspended")]
    assert ends == [("finished", 0)], said
    assert fingerprint(plain.run("suspended")) == undisturbed(2, *UNHURRIED)


def test_user_signal(user: User) -> None:
    """SIGUSR2 asks for a requeue, which rank 0 alone makes, through submitit's own handler."""
    hit_and_compare(user, "usr2", ("scancel", "--signal", "USR2", "{job}"))


def test_signalled_before_python_runs(user: User, tmp_path: Path) -> None:
    """Slurm may send its warning while the ranks are being started, and it ends a program that does not expect it. That
    is a stop like any other, not a failure: a run whose budget of timeouts was used up began again all the same."""
    slow = tmp_path / "slow"
    waits = f"[ -e {tmp_path}/$SLURM_PROCID ] || {{ touch {tmp_path}/$SLURM_PROCID; exec sleep 600; }}"
    slow.write_text(f'#!/bin/sh\n{waits}\nexec "$@"\n')
    slow.chmod(0o755)
    words = ("--name", "before-python", SHORT, f"launch.python={slow} {user.python}", "launch.max_failures=0")
    following = user.begins(*TWO_RANKS, *words, "--follow")
    started = [tmp_path / "0", tmp_path / "1"]
    user.waits("before-python", lambda: all(file.exists() for file in started), "has not started its ranks")
    user.cluster.run("scancel", "--signal", "USR2", user.job_of("before-python"))
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    ends = [(end["reason"], end["restart"]) for end in user.attempts("before-python")]
    assert ends == [("preempted", 0), ("finished", 1)], said


HELD_IMPORT = """
import sys, time
class Held:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open({folder!r} + "/held." + __import__("os").environ["SLURM_PROCID"], "w").close()
            time.sleep(600)
sys.meta_path.insert(0, Held())
"""


def test_preempted_while_it_imports(user: User, tmp_path: Path) -> None:
    """From a slow disk an import of torch takes longer than KillWait, after which Slurm kills the batch shell as well:
    with PreemptMode=CANCEL nobody would be left to requeue the job, and the run would be over."""
    (tmp_path / "sitecustomize.py").write_text(HELD_IMPORT.format(folder=str(tmp_path)))
    slow = tmp_path / "slow"  # the first start alone is
    first = f"PYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable}"
    slow.write_text(f'#!/bin/sh\n[ -e {tmp_path}/held.0 ] && exec "$@"\nshift\n{first} "$@"\n')
    slow.chmod(0o755)
    words = ("--partition", "cancel", "--name", "imports", SHORT, f"launch.python={slow} {user.python}")
    following = user.begins(*TWO_RANKS, *words, "--follow")
    held = [tmp_path / "held.0", tmp_path / "held.1"]
    user.waits("imports", lambda: all(file.exists() for file in held), "does not import torch")
    user.cluster.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    said, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, said
    assert [end["reason"] for end in user.attempts("imports")] == ["preempted", "finished"], said


def test_ranks_in_an_image(user: User, tmp_path: Path) -> None:
    """An image rarely has Slurm's commands, so rank 0 can neither query nor requeue its job: the batch shell, which
    runs outside the image, must. (Here a program that hides the commands stands in for the container.)"""
    notes, inside = tmp_path / "notes", tmp_path / "inside"
    inside.write_text(f'#!/bin/sh\necho "rank $SLURM_PROCID $ARGUMENT" >>{notes}\nPATH=/nonexistent exec "$@"\n')
    inside.chmod(0o755)
    more = (f"launch.python={inside} {user.python}", "launch.srun=['--export=ALL,ARGUMENT=of srun']")
    fault = ("scancel", "--signal", "USR2", "{job}")
    hit_and_compare(user, "image", fault, *more)
    assert sorted(notes.read_text().splitlines()) == [f"rank {rank} of srun" for rank in range(2) for _ in range(2)]
    user.waits_for("image", "'scontrol'; the batch shell tries again")


@pytest.mark.parametrize("partition", ["main", "grace", "cancel"])
def test_preemption(user: User, partition: str) -> None:
    """A job in `high` takes the nodes. In a partition with a GraceTime, Slurm considers a job finished if it exits at
    the first SIGTERM, and with PreemptMode=CANCEL it would end the job for good: there the run must requeue itself."""
    all_nodes = ("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    hit_and_compare(user, f"preempted-in-{partition}", all_nodes, "--partition", partition)


def test_time_limit(user: User, tmp_path: Path) -> None:
    """The warning before the time limit saves the run. With its budget of timeouts used up it ends, and can be resumed.

    With a limit of one minute submitit would count any signal as a timeout; here Slurm is asked. Slurm sends the
    warning up to 30 s early: here 20 to 50 s after the start, when the ranks have long been able to catch it, before
    they wait in step 5 or while they do. (With a warning of 50 s it could come at once, and end a starting Python.)
    """
    limits = ("--time", "1", "launch.signal_delay_s=10", "launch.max_timeouts=0")
    held = ("task=tests.support.tasks.Held", f"launch.env.LASTSTEP_TEST_HOLD=5 {tmp_path}")
    user.types(*TWO_RANKS, "--name", "limited", *SMALL, "train.epochs=2", *held, *limits)
    user.waits_for("limited", "SIGUSR2")
    (tmp_path / "go").touch()
    first, *rest = user.waits_for_end("limited", "timeout")
    assert not rest and first["lost_steps"] == 0
    user.waits_until_gone(user.job_of("limited"))
    user.types("resume", "limited", "--time", "60", "--follow")
    assert [a["reason"] for a in user.attempts("limited")] == ["timeout", "finished"]
    steps = [line["step"] for line in fingerprint(user.run("limited"))["metrics"] if "loss" in line]
    assert steps == list(range(1, 15))


def test_scancel_ends_the_run_and_resume_goes_on_at_another_size(user: User) -> None:
    """A cancelled run stays cancelled (a requeue would start it again) but has lost nothing."""
    user.types(*TWO_RANKS, "--name", "cancelled", *WAITS)
    user.waits_for("cancelled", "holds in its step 8", times=2)
    job = user.job_of("cancelled")
    said = user.types("resume", "cancelled", status=2)
    assert f"job {job} of this run is in the queue" in said, "two jobs at once on one run would tear it apart"
    user.cluster.run("scancel", job)
    (cancelled,) = user.waits_for_end("cancelled", "cancelled")
    assert not cancelled["requeue"]
    user.waits_until_gone(job)

    user.types("resume", "cancelled", "--nodes", "1", "--follow")
    first, second = user.attempts("cancelled")
    assert (first["reason"], second["reason"]) == ("cancelled", "finished")
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert first["lost_steps"] == 0 and second["start_step"] == first["end_step"]
    lines = fingerprint(user.run("cancelled"))["metrics"]
    assert [line["step"] for line in lines] == [line["step"] for line in undisturbed(2, *WAITS)["metrics"]]


def test_slurm_misbehaves(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm takes a job and a requeue, and reports errors; squeue and scontrol show a part of what they should. There
    is one job, no step is lost, and the user need not do anything. `make chaos SLURM=1` is the long form."""
    faults = {
        "submit": Target("submit", "command", "sbatch", 0, "lie"),
        "status": Target("status", "command", "squeue", 0, "part"),
        "stop": Target("stop", "ranks", "scontrol requeue", 0, "lie"),
        "restart": Target("restart", "ranks", "scontrol show job", 0, "part"),
    }
    day = Day(cluster, tmp_path, "bad-day", faults, ("submit", "start", "status", "stop", "restart", "end"), epochs=2)
    day.live()
    day.check(None)
    assert not day.wrong and not [wrong for one in day.outcomes for wrong in one.wrong], (day.wrong, day.outcomes)
    assert all(one.hit and one.came == "nothing" for one in day.outcomes), day.outcomes


def test_an_expedited_requeue(tmp_path: Path) -> None:
    """Where Slurm can, the job starts again at once, and ends for good when it is cancelled: Slurm would hold it
    otherwise. An older Slurm ignores the setting, and requeues as ever."""
    require(missing())
    conf = SLURM_CONF + "SlurmctldParameters=enable_expedited_requeue\n"
    cluster = Cluster.start(tmp_path / "slurm", accounting=False, owner=os.getpid(), nodes=("n1",), slurm_conf=conf)
    try:
        user = User(cluster, tmp_path / "runs")
        expedites = can_expedite(cluster.run("sbatch", "--version"))
        user.types("--name", "soon", *WAITS, "train.epochs=3")  # long enough that the second attempt holds too
        user.waits_for("soon", "holds in its step 8")
        job = user.job_of("soon")
        assert ("--requeue=expedite" in (user.run("soon").logs / f"{job}_submission.sh").read_text()) is expedites
        cluster.run("scontrol", "requeue", job)
        (first,) = user.waits_for_end("soon", "preempted")
        user.waits_for("soon", "holds in its step 8", times=2)
        (second,) = read_lines(user.run("soon").attempt_now)
        assert (second["job_id"], second["restart"], second["start_step"]) == (job, 1, first["end_step"])
        assert not expedites or second["start"] - first["end"] < CRED_EXPIRE_S + 1, "Slurm has held the job"
        cluster.run("scancel", job)
        user.waits_until_gone(job)
    finally:
        cluster.stop()

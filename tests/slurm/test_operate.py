"""The commands for a researcher with thirty runs, on a real Slurm with accounting and on one without.

They use only squeue and the files of the runs: many sites have no accounting, or none for users.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laststep.records.metrics import newest_step
from tests.slurm.cluster import Cluster
from tests.slurm.user import User
from tests.support.commands import LONG, SLOW_STEPS
from tests.support.project import DEADLINE_S, PROJECT

TWO_RANKS = ("--tasks-per-node", "2")
QUEUED = 25
SUBMIT_MANY = """
import sys
from laststep import Config, submit
for number in range(int(sys.argv[2])):
    words = [f"launch.root={sys.argv[1]}", f"launch.name=held-{number:02}", "launch.slurm.hold=true"]
    submit(Config.load("mnist", words))
"""


@pytest.fixture(scope="module")
def bare(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of a cluster without accounting."""
    started = Cluster.start(tmp_path_factory.mktemp("bare"), accounting=False, owner=os.getpid())
    yield User(started, tmp_path_factory.mktemp("bare-runs"))
    started.stop()


def stands(user: User, *names: str) -> dict[str, dict[str, Any]]:
    """The output of `status --json`, by run."""
    found: list[dict[str, Any]] = json.loads(user.types("status", *names, "--json"))
    return {one["run"]: one for one in found}


def until(user: User, name: str, state: str) -> dict[str, Any]:
    """Wait until `status` shows this state of the run."""

    def stood() -> dict[str, Any] | None:
        found = stands(user, name)[name]
        return found if found["state"] == state else None

    found = user.cluster.wait_for(stood, DEADLINE_S, f"status never said that {name} is {state}", poll_s=0.5)
    assert found is not None
    return found


def test_thirty_runs(bare: User, tmp_path: Path) -> None:
    """One table shows which run waits and why, and which is running, requeued, failed, lost or finished."""
    many = [sys.executable, "-c", SUBMIT_MANY, str(bare.root), str(QUEUED)]
    subprocess.run(many, cwd=PROJECT, env=bare.env, check=True, timeout=DEADLINE_S)
    bare.types("--name", "requeued", *LONG)
    bare.types("--name", "lost", "launch.max_failures=0", "checkpoint.every_minutes=null", *LONG)
    bare.types("--name", "running", *LONG)
    bare.types("--name", "failed", *TWO_RANKS, "task=tests.support.tasks.Broken", "launch.max_failures=0")
    bare.types("--name", "finished", "train.max_steps=3")
    bare.waits("lost", lambda: newest_step(bare.run("lost").metrics), "wrote no step")
    bare.kills("lost", 0)
    until(bare, "lost", "lost")
    until(bare, "failed", "failed")
    until(bare, "finished", "finished")
    bare.waits_for("running", "step 10/")
    bare.waits_for("requeued", "step 10/")
    bare.cluster.run("scontrol", "requeue", bare.job_of("requeued"))
    until(bare, "requeued", "requeued")

    found = stands(bare)
    assert len(found) == QUEUED + 5
    assert {one["state"] for name, one in found.items() if name.startswith("held")} == {"queued"}
    assert found["held-00"]["why"] == "JobHeldUser"
    for state in ("running", "finished", "failed", "lost", "requeued"):
        assert found[state]["state"] == state
    running = found["running"]
    assert running["step"] >= 10 and running["total_steps"] == 100_000 and running["eta_s"] > 0
    assert 0 < running["goodput"] <= 1 and running["samples_per_s"] > 0
    assert found["lost"]["lost_steps"] >= 10 and found["requeued"]["lost_steps"] == 0

    table = bare.types("status").splitlines()
    assert len(table) == 1 + QUEUED + 5 + 1, "a header, a row per run, the totals"
    assert any(line.startswith("held-24") and "JobHeldUser" in line for line in table)
    assert "preempted" in bare.types("status", "requeued"), "one run alone comes with its attempts"

    silent = tmp_path / "squeue"
    silent.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    silent.chmod(0o755)
    deaf = User(bare.cluster, bare.root)
    deaf.env["PATH"] = f"{tmp_path}:{deaf.env['PATH']}"
    unknown = {name for name, one in stands(deaf).items() if one["state"] == "unknown"}
    assert unknown == set(found) - {"finished", "failed", "lost"}, "a silent scheduler is no sign of an end"

    for name in ("running", "requeued", "held-07"):
        bare.types("cancel", name)
        assert stands(bare, name)[name]["state"] == "cancelled"
    assert "finished, so there is nothing to cancel" in bare.types("cancel", "finished")


def test_cancel_keeps_every_step(user: User) -> None:
    """Unlike scancel, `cancel` leaves enough time for the step and its save. The run can be resumed at another size."""
    user.types("--name", "stopped", *TWO_RANKS, *SLOW_STEPS, "train.max_steps=200")
    user.waits_for("stopped", "step 20/200")
    said = user.types("cancel", "stopped")
    (record,) = user.attempts("stopped")
    assert record["reason"] == "cancelled" and record["lost_steps"] == 0
    assert f"stopped after step {record['end_step']}, every step is kept" in said
    assert stands(user, "stopped")["stopped"]["state"] == "cancelled"
    user.types("resume", "stopped", "--tasks-per-node", "1", "--follow")
    found = stands(user, "stopped")["stopped"]
    assert (found["state"], found["step"], found["attempts"]) == ("finished", 200, 2)


def test_logs_and_a_drill(bare: User) -> None:
    """`logs -f` continues through the requeue, and `drill` reports that it cost no step."""
    bare.types("--name", "drilled", *TWO_RANKS, *SLOW_STEPS, "train.max_steps=200")
    following = bare.begins("logs", "drilled", "-f")
    bare.waits_for("drilled", "step 20/200")
    said = bare.types("drill", "drilled")
    assert "drilled: 0 lost steps, " in said
    printed, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0, printed
    lines = printed.splitlines()
    assert any("resuming after step" in line for line in lines) and any("finished: epoch" in line for line in lines)
    begins = [line.partition(" |")[0].strip() for line in lines if "attempt begins" in line]
    assert begins == ["0", "0"], "both attempts, each once, however many ranks begin it"
    assert "\x1b" not in printed
    second = bare.types("logs", "drilled", "--attempt", "1", "--rank", "1")
    assert second.count("attempt begins") == 1 and "restart 1, job step 0;" in second


OWN_TASK = """
from tests.support.tasks import Linear

class Mine(Linear):
    def datasets(self):
        print("the code of", "{day}", flush=True)
        return super().datasets()
"""


def test_later_edits_do_not_leak_in(user: User, tmp_path: Path) -> None:
    """A requeue at night must not run code that was edited after the submission."""
    (tmp_path / "mine.py").write_text(OWN_TASK.format(day="monday"))
    project = f"{PROJECT}:{user.env.get('PYTHONPATH', '')}".rstrip(":")
    command = [sys.executable, str(PROJECT / "launch.py"), "--name", "edited", *LONG, "task=mine.Mine"]
    command += [f"launch.root={user.root}", "launch.max_failures=0"]
    subprocess.run(command, cwd=tmp_path, env={**user.env, "PYTHONPATH": project}, check=True, timeout=DEADLINE_S)
    user.waits_for("edited", "step 10/")
    (tmp_path / "mine.py").write_text(OWN_TASK.format(day="tuesday"))
    user.cluster.run("scontrol", "requeue", user.job_of("edited"))
    user.waits_for("edited", "resuming after step")
    said = user.types("cancel", "edited") and user.types("logs", "edited")
    assert said.count("the code of monday") == 2 and "tuesday" not in said
    run = user.run("edited")
    assert (run.code / "mine.py").exists() and (run.code / "laststep" / "trainer.py").exists()
    assert not (run.code / ".git").exists()
    assert "torch==" in run.packages.read_text()


def test_a_sweep(user: User) -> None:
    """Four runs in one array, two at a time, two of them preempted: all finish, and no step of any is lost."""
    words = ("optim.lr=0.1,0.01", "seed=0..1", "--name", "scan", "--parallel", "2", "train.max_steps=40")
    said = user.types("sweep", *words)
    job = said.partition("job    ")[2].partition(":")[0]
    assert "4 runs, 2 at a time" in said
    for number, name in enumerate(("scan-lr_0.1-seed_0", "scan-lr_0.1-seed_1")):
        log = user.run(name).logs / f"{job}_{number}_0_log.out"

        def stepped(log: Path = log) -> bool:
            return log.exists() and "step 10/40" in log.read_text()

        user.cluster.wait_for(stepped, DEADLINE_S, f"{name} did no step")
        user.cluster.run("scontrol", "requeue", f"{job}_{number}")

    def done() -> dict[str, dict[str, Any]] | None:
        found = {one["run"]: one for one in json.loads(user.types("status", "--sweep", "scan", "--json"))}
        return found if all(one["state"] == "finished" for one in found.values()) else None

    found = user.cluster.wait_for(done, DEADLINE_S, "the sweep did not finish", poll_s=1)
    assert found is not None and len(found) == 4
    assert all(one["step"] == 40 and one["lost_steps"] == 0 for one in found.values())
    assert [found[f"scan-lr_0.1-seed_{seed}"]["attempts"] for seed in (0, 1)] == [2, 2]
    assert "all of them have finished" in user.types("sweep", *words)
    best, *_ = user.types("status", "--sweep", "scan", "--by", "val_accuracy").splitlines()[1:]
    assert best.startswith("scan-lr_")
    assert user.types("logs", "scan-lr_0.01-seed_1").count("attempt begins") == 1, "its own lines alone"

"""Which nodes the next ranks start on, and which ones a job is kept from, with a stand-in for Slurm.

tests/slurm/test_nodes.py tests it on a real one.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.config.schema import Launch
from laststep.job import nodes
from laststep.records.attempt_record import read_ended_attempts
from laststep.records.attempts import begin_attempt, end_attempt
from laststep.rundir import RunDir
from laststep.submission.sbatch import run_executor
from tests.support.commands import FakeSlurm, after_ranks
from tests.support.records import a_world

FOUR = ("n1", "n2", "n3", "n4")
KILLED = 137
# The batch shell of a job on n1, n2 and n3, which trains on two of them.
WORLD = a_world(size=2, launcher="submitit-slurm", hosts=("n1", "n2"), local_size=1, nodes=3)
SPARE = Launch(nodes=2, spare_nodes=1)


@pytest.mark.parametrize(
    ("unfit", "blamed", "excluded", "least", "most", "chosen"),
    [
        # Two of four nodes train.
        ("", {}, "", 2, 2, "n1 n2"),
        ("n2", {}, "", 2, 2, "n1 n3"),
        ("", {"n1": 1}, "", 2, 2, "n2 n3"),
        ("", {"n1": 1, "n2": 1, "n3": 1}, "", 2, 2, "n1 n4"),
        ("n3 n4", {"n1": 1}, "", 2, 2, "n1 n2"),
        ("", {"n1": 2}, "n1", 2, 2, "n2 n3"),
        ("n3 n4", {"n1": 2}, "n1", 2, 2, "n1 n2"),  # better than a place in the queue
        ("n2 n3 n4", {}, "", 2, 2, ""),
        # As many as are left, of 2-4.
        ("", {"n1": 1}, "", 2, 4, "n1 n2 n3 n4"),
        ("n4", {"n1": 1}, "", 2, 4, "n1 n2 n3"),
        ("", {"n1": 2}, "n1", 2, 4, "n2 n3 n4"),
        ("n3 n4", {"n1": 2}, "n1", 2, 4, "n1 n2"),
        ("n4", {"n1": 3, "n2": 2}, "n1 n2", 2, 4, "n2 n3"),  # the least bad
        ("n1 n2 n3", {}, "", 2, 4, ""),
    ],
)
def test_choice(unfit: str, blamed: Mapping[str, int], excluded: str, least: int, most: int, chosen: str) -> None:
    found = nodes.choose_nodes(FOUR, unfit.split(), blamed, excluded.split(), least, most)
    assert found == chosen.split()


def test_nodes_that_srun_names() -> None:
    """As Slurm 22.05 prints it where slurmd does not answer, and once slurmctld has given up the node."""
    log = """\
srun: error: Task launch for StepId=87303.1 failed on node n2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: error: Node failure on gpu-07.cluster
srun: error: n1: task 0: Exited with exit code 1
"""
    assert nodes.lost_nodes(log) == ["n2", "gpu-07.cluster"]


@pytest.mark.parametrize(
    ("log", "node"),
    [
        ("srun: error: n2: tasks 0-3: Killed\nsrun: Force Terminated StepId=7.0\n", ["n2"]),
        ("srun: error: n2: task 5: Out Of Memory\nsrun: error: n1: task 0: Exited with exit code 1\n", ["n2"]),
        ("srun: error: n1: task 0: Killed\nsrun: error: n2: task 1: Killed\n", []),
        ("slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T21:21:28 ***\n", []),
    ],
)
def test_where_all_ranks_were_killed(log: str, node: list[str]) -> None:
    """One node is to blame if it alone killed its ranks. A dead srun says nothing about a node."""
    assert nodes.where_killed(log) == node


def test_asked_to_stop() -> None:
    """Only the signals that ask for a stop count: a rank that ends with an error, or is killed, has failed."""
    log = "srun: error: n2: tasks 0-3: User defined signal 2\n"
    assert nodes.asked_to_stop(log, 137) is signal.SIGUSR2
    killed = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Killed\n"
    assert nodes.asked_to_stop(killed, 137) is None
    assert nodes.asked_to_stop("", 128 + signal.SIGUSR1) is signal.SIGUSR1


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A job on three nodes in a partition of five."""
    slurm = FakeSlurm("n1", "n2", "n3")
    slurm.job = {"JobState": "RUNNING", "Restarts": 0, "Partition": "main", "ExcNodeList": "(null)"}
    monkeypatch.setattr(subprocess, "run", slurm.answer)
    return slurm


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    return run


def fails(run: RunDir, *blamed: str, launch: Launch = SPARE) -> None:
    """An attempt keeps a step and fails, which it blames on these nodes."""
    begin_attempt(run, WORLD, start_step=0)
    end_attempt(run, WORLD, launch, "failed", 5, 5, error="gone", blamed=blamed)


def restarts_on(run: RunDir, launch: Launch = SPARE, starts: int = 1) -> list[str]:
    """The nodes on which the ranks start after the last of these starts; none if they do not."""
    run.next_nodes(WORLD.job_id).unlink(missing_ok=True)
    if not after_ranks(run, WORLD, launch, KILLED, restarts=starts - 1, can_restart=True):
        return []
    options = run.next_nodes(WORLD.job_id).read_text()
    chosen = re.search(r"--nodelist=(\S+)", options)
    assert chosen is not None
    names = chosen[1].split(",")
    assert f"--nodes={len(names)} --ntasks={len(names) * launch.ranks_per_node} " in options
    return names


def test_a_blamed_node_is_replaced(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it is dead or only killed a rank: the spare one is there."""
    fails(run, "n2")
    assert restarts_on(run) == ["n1", "n3"]
    assert "the ranks start on n1, n3 (n2 was blamed)" in capsys.readouterr().out
    fails(run)
    assert restarts_on(run, starts=2) == ["n1", "n3"], "it is remembered"
    fails(run, "n3")
    assert restarts_on(run, starts=3) == ["n1", "n2"], "n2 and n3 were blamed once each"
    fails(run, "n2")
    assert restarts_on(run, starts=4) == ["n1", "n3"], "n2 was blamed twice"


def test_a_node_that_is_silent(run: RunDir, slurm: FakeSlurm) -> None:
    """No spare node is left, or there never was one, and Slurm has not noticed yet: a blamed node is asked itself."""
    either = Launch(nodes="1-3")
    fails(run, "n2", launch=either)
    assert restarts_on(run, either) == ["n1", "n2", "n3"], "only a rank was killed"
    slurm.silent = {"n2"}
    assert restarts_on(run, either) == ["n1", "n3"]
    slurm.states["n3"] = "DOWN*"
    assert restarts_on(run, either) == ["n1"]


def test_too_few_are_left(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """The allocation is given back."""
    fails(run, "n2")
    slurm.states["n1"] = "DOWN*"
    slurm.silent = {"n2"}
    assert restarts_on(run) == [] and slurm.requeues == 1
    assert "no restart in this allocation: n1 is DOWN*, n2 does not answer, 1 node left" in capsys.readouterr().out


def test_a_silent_node_of_a_plain_job(run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """No other node could take its place, so the allocation is given back at once. If only a rank was killed there, or
    the node is back, the ranks start again."""
    plain = Launch(nodes=2)
    fails(run, "n2", launch=plain)
    assert after_ranks(run, WORLD, plain, KILLED, can_restart=True)
    fails(run, "n2", launch=plain)
    slurm.silent = {"n2"}
    assert not after_ranks(run, WORLD, plain, KILLED, restarts=1, can_restart=True) and slurm.requeues == 1
    assert "no restart in this allocation: n2 does not answer" in capsys.readouterr().out


def test_a_node_that_kills_all_ranks(run: RunDir, slurm: FakeSlurm) -> None:
    """No rank is left to blame it. The next ranks start on the spare node."""
    alone = Launch(nodes=1, spare_nodes=1)
    begin_attempt(run, replace(WORLD, size=2, hosts=("n1", "n1"), nodes=1), start_step=0)
    log = run.logs / f"{WORLD.job_id}_0_log.out"
    log.write_text("[laststep 12:00:00] step 5\nsrun: error: n1: tasks 0-1: Killed\n")
    assert restarts_on(run, alone) == ["n2"]
    (end,) = read_ended_attempts(run.attempts)
    assert (end["reason"], end["blamed"]) == ("lost", ["n1"])


def test_a_step_that_could_not_start(run: RunDir, slurm: FakeSlurm) -> None:
    """A node has died between two starts. What srun says of it is the only evidence."""
    log = run.logs / f"{WORLD.job_id}_0_log.out"
    said = "srun: error: Task launch for StepId=7.1 failed on node n2: Communication connection failure"
    log.write_text(f"[laststep 12:00:00] restarting the ranks\n{said}\n")
    assert restarts_on(run) == ["n1", "n3"]
    (end,) = read_ended_attempts(run.attempts)
    assert (end["reason"], end["blamed"], end["requeue"]) == ("failed", ["n2"], True)


def test_a_job_that_cannot_start_anywhere(run: RunDir, slurm: FakeSlurm) -> None:
    """No node is named, so it would fail on others as well: it is requeued, as without spare nodes."""
    assert restarts_on(run) == [] and slurm.requeues == 1


@pytest.mark.parametrize(
    ("before", "blamed", "total", "exclude_after", "after"),
    [
        ("(null)", ["n2"], 5, 2, None),
        ("(null)", ["n2", "n2"], 5, 2, "n2"),
        ("n5", ["n2", "n2"], 5, 2, "n2,n5"),  # the user's own
        ("n2", ["n2", "n2"], 5, 2, None),  # it is excluded already
        ("n2,n5", ["n2"], 5, 2, "n5"),  # the earlier faults have expired
        ("(null)", ["n2", "n2"], 5, None, None),
        ("(null)", ["n2", "n2", "n2", "n3", "n3"], 4, 2, "n2"),  # the job needs three of four nodes
        ("(null)", ["n2", "n2"], 3, 2, None),  # else it would never start again
    ],
)
def test_a_requeued_job(
    run: RunDir,
    slurm: FakeSlurm,
    before: str,
    blamed: list[str],
    total: int,
    exclude_after: int | None,
    after: str | None,
) -> None:
    """It must not start again on a node that the run leaves, and must start somewhere."""
    launch = replace(SPARE, exclude_after=exclude_after, max_restarts=0, exclude="n5")
    for node in blamed:
        fails(run, node, launch=launch)
    assert slurm.job
    slurm.job["ExcNodeList"] = before
    slurm.partition_nodes = total
    after_ranks(run, WORLD, launch, KILLED)
    assert slurm.requeues == 1
    assert slurm.excluded == ([] if after is None else [after])


def script(run: RunDir, *words: str) -> str:
    """The sbatch script of a run with this configuration."""
    config = Config.load("mnist", [f"launch.root={run.path.parent}", "launch.name=run", *words])
    return run_executor(config, run).script()


def test_a_resumed_run(run: RunDir, slurm: FakeSlurm) -> None:
    """Its new job is kept from the nodes that the run leaves, and from those that the user excludes."""

    def excluded(*words: str) -> list[str]:
        return re.findall(r"#SBATCH --exclude=(\S+)", script(run, "launch.nodes=2", *words))

    assert excluded() == []
    fails(run, "n2")
    fails(run, "n2")
    assert excluded() == ["n2"]
    assert excluded("launch.exclude=n[4-5]") == ["'n[4-5],n2'"]
    assert excluded("launch.exclude_after=null") == []


def test_what_is_submitted(run: RunDir) -> None:
    """A spare node is part of the job, which outlives its nodes; the ranks start on the others."""

    plain, spare = script(run, "launch.nodes=2"), script(run, "launch.nodes=2", "launch.spare_nodes=1")
    assert "no-kill" not in plain and "--ntasks-per-node=1" in plain
    for line in ("#SBATCH --nodes=3\n", "#SBATCH --no-kill\n", "#SBATCH --mincpus=1\n"):
        assert line in spare
    assert "granted=$((SLURM_JOB_NUM_NODES - 1))" in spare and "ntasks-per-node" not in spare
    assert "#SBATCH --nodes=2-5\n" in script(run, "launch.nodes=2-4", "launch.spare_nodes=1", "train.batch_size=48")

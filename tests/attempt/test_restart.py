"""What follows the end of an attempt, and who acts on it: each line of the tables in laststep/attempt/restart.py."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest

from laststep.attempt import ending, restart
from laststep.attempt.ending import AttemptState
from laststep.attempt.restart import Actor, Follows, Verdict, what_follows, who_acts
from laststep.config.schema import Launch
from laststep.ranks.fault import Fault
from laststep.ranks.slurm import Job, KillLimits
from laststep.ranks.world import World
from laststep.records.attempts import begin_attempt, end_attempt
from laststep.records.retry import Decision, Next
from laststep.rundir import RunDir
from tests.support.commands import FakeSlurm
from tests.support.records import a_world

RESTART, REQUEUE, USED_UP = Decision(Next.RESTART), Decision(Next.REQUEUE), Decision(Next.END, "the budget is used up")
RUNS: Job = {"JobState": "RUNNING", "Restarts": "0", "EndTime": "Unknown"}
NEAR = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 5))
Starts = Literal[Follows.RESTART_IN_STEP, Follows.NEW_STEP]
IN_STEP: Starts = Follows.RESTART_IN_STEP
NEW_STEP: Starts = Follows.NEW_STEP


@pytest.mark.parametrize(
    ("policy", "job", "asker", "obstacle", "verdict"),
    [
        pytest.param(USED_UP, RUNS, NEW_STEP, "", Verdict(Follows.END, "the budget is used up"), id="used up"),
        pytest.param(RESTART, RUNS, IN_STEP, "", Verdict(IN_STEP), id="supervisors"),
        pytest.param(RESTART, RUNS, NEW_STEP, "", Verdict(NEW_STEP), id="batch shell"),
        pytest.param(RESTART, RUNS, None, "", Verdict(Follows.REQUEUE), id="nobody can start the ranks"),
        pytest.param(REQUEUE, RUNS, NEW_STEP, "", Verdict(Follows.REQUEUE), id="restarts are used up"),
        pytest.param(RESTART, RUNS, NEW_STEP, "n2 is DOWN", Verdict(Follows.REQUEUE, "n2 is DOWN"), id="bad node"),
        pytest.param(
            RESTART,
            {**RUNS, "EndTime": NEAR},
            NEW_STEP,
            "",
            Verdict(Follows.REQUEUE, "its time limit is near"),
            id="near its limit",
        ),
        pytest.param(
            RESTART, {**RUNS, "JobState": "CANCELLED"}, NEW_STEP, "", Verdict(Follows.END), id="cancelled meanwhile"
        ),
        pytest.param(
            USED_UP, {**RUNS, "Restarts": "1"}, NEW_STEP, "", Verdict(Follows.SLURM_REQUEUES), id="Slurm was faster"
        ),
        pytest.param(RESTART, {"JobState": "REPLACED"}, IN_STEP, "", Verdict(Follows.END), id="another job has its id"),
    ],
)
def test_what_follows(policy: Decision, job: Job, asker: Starts | None, obstacle: str, verdict: Verdict) -> None:
    """Each process that may be the last one alive gets the same decision."""
    assert what_follows(policy, job, 0, Launch(), asker, lambda: obstacle) == verdict


def test_rank_0_requeues_while_slurmctld_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a user's own batch script nobody else does it: the run ended after a stop that had saved every step."""
    slurm = FakeSlurm("n1")
    slurm.busy = ["requeue"]
    monkeypatch.setattr(subprocess, "run", slurm.answer)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    run, world = RunDir(tmp_path), a_world(launcher="srun", on_slurm=True)
    begin_attempt(run, world, 0)
    record = end_attempt(run, world, Launch(), "preempted", 1, 1)
    ending.requeue(cast(AttemptState, SimpleNamespace(world=world, run_dir=run, cause_signal=None)), record)
    assert slurm.requeues == 1 and f"] requeued job {world.job_id}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("behind_s", "left_s", "follows"), [(-600.0, 400.0, NEW_STEP), (600.0, 5.0, Follows.REQUEUE)])
def test_a_node_whose_clock_is_wrong(
    behind_s: float, left_s: float, follows: Follows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EndTime is the controller's. By a clock that is ahead of it the time limit is always near: each fault gave the
    allocation back. By one that is behind, the ranks would start again a moment before the limit."""
    monkeypatch.setattr(restart, "kill_limits", lambda: KillLimits(clock_ahead_s=behind_s))
    ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + behind_s + left_s))
    assert what_follows(RESTART, {**RUNS, "EndTime": ends}, 0, Launch(), NEW_STEP, lambda: "").follows is follows


SUBMITTED = a_world(launcher="submitit-slurm", on_slurm=True)


@pytest.mark.parametrize(
    ("world", "silent", "shell_killed", "srun_ends", "actor"),
    [
        pytest.param(replace(SUBMITTED, step_restarts=0), True, False, False, Actor.SUPERVISORS, id="supervised"),
        pytest.param(replace(SUBMITTED, step_restarts=0), False, True, False, Actor.RANK, id="no shell is left"),
        pytest.param(SUBMITTED, False, False, False, Actor.SHELL, id="batch shell"),
        pytest.param(SUBMITTED, True, False, False, Actor.RANK, id="srun may never end"),
        pytest.param(SUBMITTED, True, False, True, Actor.SHELL, id="srun was ended"),
        pytest.param(
            a_world(launcher="torchrun", launcher_restarts=True), False, False, False, Actor.LAUNCHER, id="torchrun"
        ),
        pytest.param(a_world(launcher="torchrun"), False, False, False, Actor.RANK, id="torchrun's last start"),
        pytest.param(a_world(launcher="srun", on_slurm=True), False, False, False, Actor.RANK, id="srun by hand"),
    ],
)
def test_who_acts(world: World, silent: bool, shell_killed: bool, srun_ends: bool, actor: Actor) -> None:
    """Nobody acts twice, and somebody acts always."""
    fault = Fault("failed", "rank 1 failed", silent=silent)
    assert who_acts(world, fault, shell_killed, srun_ends) is actor

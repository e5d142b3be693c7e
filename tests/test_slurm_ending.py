"""Why a signal came: the table in trainer/world/slurm.py, row by row.

Judged wrongly, a job that would come back is requeued twice, a cancelled one rises again, or a run that met its time
limit is never heard of again.
"""

from __future__ import annotations

import subprocess
import time
from signal import SIGINT, SIGTERM, SIGUSR1, SIGUSR2, Signals
from typing import Any

import pytest

from trainer.world.detect import World
from trainer.world.slurm import EARLY_S, Ending, ending, judge

NOW = 1_800_000_000.0
DELAY_S = 90
ON_SLURM = World(0, 1, 0, 0, 1, ("n1",), "7", 1, "slurm")
ELSEWHERE = World(0, 1, 0, 0, 1, ("here",), "local7", 0, "local")


def slurm_time(seconds: float) -> str:
    """As Slurm prints it, in local time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def job(
    state: str, restarts: int = 1, reason: str = "None", left_s: float = 3600, preempted: str = "None"
) -> dict[str, str]:
    """The fields of `scontrol show job` that matter; the attempt that asks is the one after restart 1."""
    return {
        "JobState": state,
        "Restarts": str(restarts),
        "Reason": reason,
        "EndTime": slurm_time(NOW + left_s),
        "PreemptTime": preempted,
    }


@pytest.mark.parametrize(
    ("number", "shown", "expected"),
    [
        pytest.param(SIGTERM, job("COMPLETING", restarts=2), Ending("preempted", False), id="requeue"),
        pytest.param(SIGTERM, job("PENDING", restarts=2), Ending("preempted", False), id="requeue-quick"),
        pytest.param(SIGUSR2, job("COMPLETING", restarts=2), Ending("preempted", False), id="requeue-by-usr2"),
        pytest.param(SIGTERM, job("RUNNING", preempted=slurm_time(NOW)), Ending("preempted", True), id="grace"),
        pytest.param(SIGTERM, job("COMPLETING", reason="TimeLimit"), Ending("timeout", True), id="limit-term"),
        pytest.param(SIGUSR2, job("RUNNING", left_s=DELAY_S), Ending("timeout", True), id="limit-usr2"),
        pytest.param(SIGUSR1, job("RUNNING", left_s=DELAY_S), Ending("timeout", True), id="limit-usr1"),
        pytest.param(SIGUSR2, job("RUNNING", left_s=DELAY_S + EARLY_S), Ending("timeout", True), id="limit-usr2-early"),
        pytest.param(SIGUSR2, job("RUNNING", left_s=DELAY_S + EARLY_S + 5), Ending("preempted", True), id="user-usr2"),
        pytest.param(SIGUSR2, job("RUNNING") | {"EndTime": "Unknown"}, Ending("preempted", True), id="no-limit-usr2"),
        pytest.param(SIGTERM, job("COMPLETING"), Ending("cancelled", False), id="scancel"),
        pytest.param(SIGUSR2, job("COMPLETING"), Ending("cancelled", False), id="scancel-after-usr2"),
        pytest.param(SIGTERM, job("RUNNING"), Ending("preempted", True), id="kill"),
        pytest.param(SIGINT, job("RUNNING"), Ending("cancelled", False), id="ctrl-c"),
        pytest.param(SIGINT, job("RUNNING"), Ending("cancelled", False), id="ctrl-c-in-srun"),
        pytest.param(SIGTERM, job("RUNNING", preempted="N/A"), Ending("preempted", True), id="kill-na"),
        pytest.param(SIGTERM, {"JobState": "COMPLETING"}, Ending("cancelled", False), id="few-fields"),
    ],
)
def test_table(number: Signals, shown: dict[str, str], expected: Ending) -> None:
    """Each cause of a signal, as Slurm shows it, has its reason in attempts.jsonl and its answer."""
    assert judge(number, shown, restart=1, signal_delay_s=DELAY_S, now=NOW) == expected


@pytest.mark.parametrize("world", [ON_SLURM, ELSEWHERE], ids=["slurm-silent", "no-slurm"])
def test_without_an_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Slurm does not answer the signal means what it says: USR2 asks for a requeue, TERM does not."""

    def no_scontrol(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("scontrol")

    monkeypatch.setattr(subprocess, "run", no_scontrol)
    assert ending(SIGUSR2, world, DELAY_S) == Ending("preempted", True)
    assert ending(SIGTERM, world, DELAY_S) == Ending("preempted" if world.on_slurm else "cancelled", False)


def test_reads_what_scontrol_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields stand among others, with spaces and further = signs in them; and a scontrol that was hit by the
    signal itself is asked again."""
    line = (
        "JobId=7 JobName=my run UserId=root(0) GroupId=root(0) Priority=1 Nice=0 Account=(null) WCKey=submitit "
        f"JobState=COMPLETING Reason=TimeLimit Dependency=(null) Requeue=1 Restarts=1 EndTime={slurm_time(NOW)} "
        "PreemptTime=None TRES=cpu=4,mem=100M,node=2 Comment=a = b Power=\n"
    )
    answers = [subprocess.CompletedProcess([], -15, "", ""), subprocess.CompletedProcess([], 0, line, "")]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answers.pop(0))
    assert ending(SIGTERM, ON_SLURM, DELAY_S) == Ending("timeout", True)
    assert answers == []

"""Why a signal was sent: the table in laststep/attempt/grace.py, row by row.

If the judgement is wrong, a job that would restart by itself is requeued twice, a cancelled job restarts, or a run that
reached its time limit never continues.
"""

from __future__ import annotations

import subprocess
import time
from signal import SIGINT, SIGTERM, SIGUSR1, SIGUSR2, Signals
from typing import Any

import pytest

from laststep.attempt.restart import EARLY_S, Ending, ending, judge
from laststep.ranks.slurm import cluster_settings, kill_limits
from laststep.ranks.world import World
from tests.support.records import a_world

NOW = 1_800_000_000.0
DELAY_S = 90
ON_SLURM = a_world(launcher="submitit-slurm", restart=1)
ELSEWHERE = a_world()


def slurm_time(seconds: float) -> str:
    """As Slurm prints it, in local time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


AT_ONCE = slurm_time(NOW)
UNEXPLAINED = Ending("failed", True, "received SIGTERM, though Slurm had not ended the job", by_srun=True)


def job(
    state: str, restarts: int = 1, reason: str = "None", left_s: float = 3600, preempted: str = "None"
) -> dict[str, str]:
    """The fields of `scontrol show job` that matter, as seen by an attempt that began with restart 1.

    `left_s` is the time to EndTime in seconds, negative for a job that has ended.
    """
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
        pytest.param(SIGTERM, job("RUNNING", preempted=AT_ONCE), Ending("preempted", True), id="grace"),
        pytest.param(SIGTERM, job("SIGNALING", preempted=AT_ONCE), Ending("preempted", True), id="grace-signaling"),
        pytest.param(SIGUSR2, job("RUNNING", left_s=9, preempted=AT_ONCE), Ending("preempted", True), id="grace-usr2"),
        pytest.param(SIGTERM, job("COMPLETING", left_s=0, preempted=AT_ONCE), Ending("preempted", True), id="cancel"),
        pytest.param(
            SIGTERM, job("COMPLETING", left_s=1, preempted=AT_ONCE), Ending("preempted", True), id="cancel-1s"
        ),
        pytest.param(
            SIGTERM,
            job("COMPLETING", reason="TimeLimit", left_s=10, preempted=AT_ONCE),
            Ending("preempted", True),
            id="cancel-after-grace",
        ),
        pytest.param(
            SIGTERM,
            job("COMPLETING", left_s=4, preempted=AT_ONCE),
            Ending("cancelled", False),
            id="scancel-within-grace",
        ),
        pytest.param(
            SIGTERM,
            job("COMPLETING", reason="JobLaunchFailure", left_s=0),
            Ending("failed", True, "the job's batch shell was killed"),
            id="batch-shell",
        ),
        pytest.param(SIGTERM, job("COMPLETING", reason="TimeLimit"), Ending("timeout", True), id="limit-term"),
        pytest.param(SIGUSR2, job("RUNNING", left_s=DELAY_S), Ending("timeout", True), id="limit-usr2"),
        pytest.param(SIGUSR1, job("RUNNING", left_s=DELAY_S), Ending("timeout", True), id="limit-usr1"),
        pytest.param(SIGUSR2, job("RUNNING", left_s=DELAY_S + EARLY_S), Ending("timeout", True), id="limit-usr2-early"),
        pytest.param(SIGUSR2, job("RUNNING", left_s=DELAY_S + EARLY_S + 5), Ending("preempted", True), id="user-usr2"),
        pytest.param(SIGUSR2, job("RUNNING") | {"EndTime": "Unknown"}, Ending("preempted", True), id="no-limit-usr2"),
        pytest.param(SIGTERM, job("COMPLETING"), Ending("cancelled", False), id="scancel"),
        pytest.param(SIGUSR2, job("COMPLETING"), Ending("cancelled", False), id="scancel-after-usr2"),
        pytest.param(SIGTERM, job("RUNNING"), UNEXPLAINED, id="kill"),
        pytest.param(SIGTERM, job("SIGNALING"), UNEXPLAINED, id="kill-signaling"),
        pytest.param(SIGTERM, job("STOPPED"), UNEXPLAINED, id="kill-stopped"),
        pytest.param(SIGTERM, job("CANCELLED"), Ending("cancelled", False), id="scancel-quick"),
        pytest.param(SIGTERM, job("RUNNING", restarts=2), Ending("preempted", False), id="requeue-runs-again"),
        pytest.param(SIGINT, job("RUNNING"), Ending("cancelled", False), id="ctrl-c-in-srun"),
        pytest.param(SIGTERM, job("RUNNING", preempted="N/A"), UNEXPLAINED, id="kill-na"),
        pytest.param(SIGTERM, {"JobState": "COMPLETING"}, Ending("cancelled", False), id="few-fields"),
    ],
)
def test_table(number: Signals, shown: dict[str, str], expected: Ending) -> None:
    """Each cause of a signal, as Slurm shows it, gives the right reason and the right decision to requeue."""
    assert judge(number, shown, restart=1, signal_delay_s=DELAY_S, now=NOW) == expected


@pytest.mark.parametrize("world", [ON_SLURM, ELSEWHERE], ids=["slurm-silent", "no-slurm"])
def test_without_an_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Slurm does not answer, the signal has its usual meaning: USR2 asks for a requeue, TERM does not. INT comes
    from `cancel` or Ctrl-C: the user has ended the run."""

    def no_scontrol(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("scontrol")

    monkeypatch.setattr(subprocess, "run", no_scontrol)
    assert ending(SIGUSR2, world, DELAY_S) == Ending("preempted", True)
    assert ending(SIGINT, world, DELAY_S) == Ending("cancelled", False)
    assert ending(SIGTERM, world, DELAY_S) == Ending("preempted" if world.on_slurm else "cancelled", False)


def test_reads_what_scontrol_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other fields contain spaces and = signs. And scontrol is called again if it was itself killed by the signal."""
    line = (
        "JobId=7 JobName=my run UserId=root(0) GroupId=root(0) Priority=1 Nice=0 Account=(null) WCKey=submitit "
        f"JobState=COMPLETING Reason=TimeLimit Dependency=(null) Requeue=1 Restarts=1 EndTime={slurm_time(NOW)} "
        "PreemptTime=None TRES=cpu=4,mem=100M,node=2 Comment=a = b Power=\n"
    )
    answers = [subprocess.CompletedProcess([], -15, "", ""), subprocess.CompletedProcess([], 0, line, "")]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answers.pop(0))
    assert ending(SIGTERM, ON_SLURM, DELAY_S) == Ending("timeout", True)
    assert answers == []


def test_kill_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for saving is the cluster's own setting, one of some 200 lines."""
    shown = "KeepAliveTime           = SYSTEM_DEFAULT\nKillOnBadExit           = 0\nKillWait                = 45 sec\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, shown, ""))
    assert cluster_settings().kill_wait_s == 45


@pytest.mark.parametrize(
    ("controller", "parameters", "client", "expedites"),
    [
        ("22.05.8", "(null)", "22.05.8", False),
        ("24.11.5", "enable_expedited_requeue", "24.11.5", False),
        ("25.11.2", "enable_expedited_requeue", "25.11.2", False),
        ("25.11.3", "enable_expedited_requeue", "25.11.3", True),
        ("25.11.10", "a=1,enable_expedited_requeue,b", "25.11.10", True),
        ("26.05.1", "enable_configless", "26.05.1", False),
        ("26.05.1", "enable_expedited_requeue", "26.05.0-rc1", True),
        ("26.05.1", "enable_expedited_requeue", "25.05.4", False),
    ],
)
def test_expedited_requeue(
    controller: str, parameters: str, client: str, expedites: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the site does not allow it Slurm refuses the job, an older sbatch does not know it, and Slurm before
    25.11.3 holds even a job that has finished."""
    asked = []

    def answer(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words[0])
        shown = f"KillWait = 45 sec\nSLURM_VERSION           = {controller}\nSlurmctldParameters     = {parameters}\n"
        return subprocess.CompletedProcess(words, 0, f"slurm {client}\n" if words[0] == "sbatch" else shown, "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert cluster_settings() == (45, expedites)
    possible = controller >= "25.11.3" or controller == "25.11.10"
    assert asked == ["scontrol", "sbatch"] if possible and "expedited" in parameters else ["scontrol"]


def test_kill_wait_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Slurm, or without an answer from it, the setting is unknown."""
    refused = subprocess.CompletedProcess([], 1, "", "slurm_load_ctl_conf error: Unable to contact slurm controller\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    assert cluster_settings().kill_wait_s is None


def test_a_node_whose_clock_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is ten minutes behind the controller's: by it the time limit would be far away, and the end be recorded
    as a preemption, of which a run may have any number."""
    now = time.time() + 600

    def answer(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        config = f"Configuration data as of {slurm_time(now)}\nKillWait = 30 sec\n"
        shown = f"JobState=RUNNING Restarts=1 PreemptTime=None EndTime={slurm_time(now + DELAY_S)}\n"
        return subprocess.CompletedProcess(words, 0, config if words[2] == "config" else shown, "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert ending(SIGUSR2, ON_SLURM, DELAY_S) == Ending("timeout", True)
    assert kill_limits().clock_ahead_s == pytest.approx(600, abs=2)

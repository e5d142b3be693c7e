"""A signal may arrive at any time, not only within a step (as in tests/loops/test_exact.py): no step is lost, and every
rank ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from laststep.attempt.grace import LAST_MOMENT_S
from laststep.ranks import stop
from laststep.ranks.launchers import RESTARTS
from laststep.records.metrics import read_lines
from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import config, only, undisturbed

STOPPED = [128 + signal.SIGTERM] * 2
OPTIONS = ("task=tests.support.tasks.SignalledElsewhere", "checkpoint.every_steps=2", "data.workers=1")


@pytest.mark.parametrize("where", ["preparing", "warming-up", "restoring", "saving"])
def test_no_step_is_lost(root: Path, where: str) -> None:
    """Before the first step there is nothing to lose, but a rank that trained on alone would wait for the others
    forever. While a save is being written the ranks must not damage it, and still have to write one for the stop."""
    attempt = Attempt(config(root, where, 2, OPTIONS), {"LASTSTEP_TEST_WHERE": where})
    assert attempt.wait() == STOPPED, attempt.output()
    (record,) = read_lines(attempt.run.attempts)
    assert (record["reason"], record["lost_steps"]) == ("cancelled", 0)
    assert (record["end_step"] >= 2) == (where == "saving")
    if where == "saving":  # the save that was in progress, and the last one
        assert 0 < record["save_s"] < record["end"] - record["start"]
    run = train(config(root, where, 2, OPTIONS))
    assert read_lines(run.attempts)[1]["start_step"] == record["end_step"]
    assert fingerprint(run) == undisturbed(2, OPTIONS)


def test_after_the_last_step(root: Path) -> None:
    """All steps are done and the last save is being written: the run finishes."""
    attempt = Attempt(config(root, "ending", 2, OPTIONS), {"LASTSTEP_TEST_WHERE": "ending"})
    assert attempt.wait() == [0, 0], attempt.output()
    assert reasons(attempt.run) == ["finished"] and fingerprint(attempt.run) == undisturbed(2, OPTIONS)


def short_answers() -> None:
    """Have ranks wait a second, not ten, for each other's answers after a signal."""
    stop.ANSWER_S = 1.0


def test_a_rank_that_cannot_answer(root: Path) -> None:
    """It reads a large file as its task is made, in C, with the interpreter's lock held. A signal has asked for the
    stop, so nothing has failed: the end counted against the budgets, and it blamed the rank's host, which a run leaves
    after the second time."""
    held = config(root, "held", 2, ("task=tests.support.tasks.HoldsTheLock",))
    attempt = Attempt(held, {"LASTSTEP_TEST_HOLD_S": "8"}, before=short_answers)
    attempt.wait_for("holds the interpreter's lock", rank=1)
    attempt.signal(signal.SIGTERM, 0)
    attempt.wait()
    assert "rank 1 did not answer within 1 s of a signal" in attempt.output()
    record = only(attempt)
    assert (record["reason"], record["blamed"], record["error"]) == ("cancelled", [], None), attempt.output()


SLOW_SAVE = ("task=tests.support.tasks.SlowSave", "launch.grace_s=4")
NO_GRACE_S = 4 - LAST_MOMENT_S


@pytest.mark.parametrize(
    ("signals", "supervised"),
    [("SIGINT", False), ("SIGTERM", True)],
    ids=["Ctrl-C", "SIGTERM under --local"],
)
def test_a_save_that_nobody_cuts_short(root: Path, signals: str, supervised: bool) -> None:
    """No SIGKILL follows these signals: to give up a slow save after launch.grace_s would lose the steps of the run."""
    env = {"LASTSTEP_TEST_SIGNAL": f"{signals} step 5 rank 0", "LASTSTEP_TEST_SAVE_S": str(NO_GRACE_S + 1)}
    if supervised:
        env[RESTARTS] = "0"
    attempt = Attempt(config(root, f"slow-{signals}", 1, SLOW_SAVE), env)
    assert attempt.wait() == [128 + signal.Signals[signals]], attempt.output()
    record = only(attempt)
    assert (record["reason"], record["end_step"], record["lost_steps"]) == ("cancelled", 5, 0)


def test_a_save_that_is_cut_short(root: Path) -> None:
    """SIGKILL follows. The record says what the signal was: as preempted the cancelled run would be started again."""
    env = {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 5 rank 0", "LASTSTEP_TEST_SAVE_S": "60"}
    attempt = Attempt(config(root, "cut-short", 1, SLOW_SAVE), env)
    assert attempt.wait() == [1], attempt.output()
    record = only(attempt)
    assert (record["reason"], record["lost_steps"], record["requeue"]) == ("cancelled", 5, False)
    assert record["error"] == "no time was left to save step 5"


def test_every_signal_at_once(root: Path) -> None:
    """Slurm sends SIGTERM twice, to every process of the job, and a user may send another signal. That is one stop. If
    a loader worker died from the signal, the current step would fail."""
    attempt = Attempt(config(root, "everywhere", 2, OPTIONS), {"LASTSTEP_TEST_WHERE": "everywhere"})
    first, second = attempt.wait()
    assert first == second and first - 128 in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    assert len(read_lines(attempt.run.attempts)) == 1
    run = train(config(root, "everywhere", 2, OPTIONS))
    assert [record["lost_steps"] for record in read_lines(run.attempts)] == [0, 0]
    assert fingerprint(run) == undisturbed(2, OPTIONS)

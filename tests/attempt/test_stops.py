"""A signal may arrive at any time, not only within a step (as in tests/loops/test_exact.py): no step is lost, and every
rank ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.ranks import Attempt, fingerprint, reasons, train
from tests.support.runs import config, undisturbed
from trainer.records.metrics import read_lines

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

"""How long the ranks live after a signal: a wrong deadline is either a lost step or one given up too early."""

from __future__ import annotations

from signal import SIGTERM, SIGUSR2, Signals

import pytest

from trainer.attempt.grace import LAST_MOMENT_S, UNSAVED_END_S, GracePeriod
from trainer.config.launch import Launch


@pytest.mark.parametrize(
    ("number", "seconds"), [(SIGTERM, 20.0), (SIGUSR2, 90.0)], ids=["SIGKILL follows", "a warning"]
)
def test_deadlines(number: Signals, seconds: float) -> None:
    """At half of the grace time the step is given up; just before its end no rank waits for anything."""
    grace = GracePeriod(Launch(grace_s=20, signal_delay_s=90))
    assert grace.seconds(number) == seconds
    assert not grace.gives_up_step(number, seconds / 2) and grace.gives_up_step(number, seconds / 2 + 0.1)
    unsaved = max(seconds / 2, seconds - UNSAVED_END_S)
    assert not grace.gives_up_step(number, unsaved, saves=False), "to give it up early would only lose it"
    assert grace.gives_up_step(number, unsaved + 0.1, saves=False)
    last = seconds - LAST_MOMENT_S
    assert not grace.is_over(number, last) and grace.is_over(number, last + 0.1)


def test_without_an_answer() -> None:
    """Outside Slurm, or if Slurm does not answer, the grace time is Slurm's default, which most clusters have."""
    grace = GracePeriod(Launch(grace_s=None))
    assert grace.kill_wait_s is None, "still to be asked for"
    assert grace.seconds(SIGTERM) == 30

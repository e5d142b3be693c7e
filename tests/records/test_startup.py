"""Where the time until the first step went."""

from __future__ import annotations

import re

import pytest

from laststep.records.progress import StartupTimer


def test_a_rank_waits_for_its_supervisors_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor imports torch before it forks the rank. "importing torch 0.00" after nine seconds of it is wrong;
    a rank that is forked again waits for no import."""
    monkeypatch.setattr(StartupTimer, "of_supervisor", StartupTimer())
    assert StartupTimer.of_supervisor is not None
    StartupTimer.of_supervisor._phase_began -= 9  # as if the import had taken nine seconds more
    StartupTimer.of_supervisor.done("importing torch")
    rank = StartupTimer()
    rank.done("importing torch")  # by the rank itself: nothing is left to import
    rank.done("meeting")
    found = re.fullmatch(r"[\d.]+ s: python ([\d.]+), importing torch ([\d.]+), meeting 0.0\d", str(rank))
    assert found and 9 <= float(found[2]) < 10, str(rank)
    monkeypatch.setattr(StartupTimer, "of_supervisor", None)
    again = StartupTimer()
    again.done("importing torch")
    assert "importing torch 0.0" in str(again)

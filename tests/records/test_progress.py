"""The lines of a run's steps."""

from __future__ import annotations

import sys
import time

import pytest

from laststep.records import progress


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_few_lines_a_second(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small model makes hundreds of steps a second, and nobody reads as many lines. A log file has them all."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    shown = progress.Progress(prints=True)
    now = shown._since
    for number in range(100):  # in one second
        monkeypatch.setattr(time, "perf_counter", lambda number=number: now + number / 100)
        if print_it := shown.of_step({"step": number, "epoch": 1, "loss": 0.5}):
            print_it()
    shown.of_epoch({"epoch": 1})()
    said = capsys.readouterr().out
    assert "step 0/" in said and "epoch 1" in said.splitlines()[-1]
    assert said.count(" step ") == (4 if terminal else 100)

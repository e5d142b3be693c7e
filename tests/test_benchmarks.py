"""Tests of what the benchmarks conclude from what they measured: not of any figure."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as everything
from benchmarks import _turns
from benchmarks._measure import MET, MISSED, NOISE, Check, check_line, interval
from benchmarks._parts import ALL, PARTS, REST, new_switch, replace
from benchmarks._turns import mean_step_s


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 0, 0), (2, 0, 1), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (12, 2, 9), (30, 9, 20)],
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, low: int, high: int) -> None:
    """As in tables of the sign test. A narrower one would call noise a miss."""
    assert interval([float(number) for number in reversed(range(count))]) == (low, high)


@pytest.mark.parametrize(
    ("values", "at_least", "verdict"),
    [
        ([0.9, 0.95, 1.0], False, MET),
        ([0.9, 1.1, 1.2], False, NOISE),
        ([1.01, 1.1, 1.2], False, MISSED),
        ([1.0, 1.1, 1.2], True, MET),
        ([0.9, 0.95, 1.1], True, NOISE),
        ([0.9, 0.95, 0.99], True, MISSED),
        ([1.0] * 11 + [5.0], False, MET),  # one trial that something else disturbed
        ([1], False, MET),
        ([2], False, MISSED),
    ],
)
def test_a_limit_within_the_interval_is_neither_met_nor_missed(
    values: list[float], at_least: bool, verdict: str
) -> None:
    """Otherwise a noisy machine would fail a benchmark, or pass one."""
    assert Check("a ratio", 1.0, values, at_least=at_least).verdict() == verdict


def test_the_summary_names_limit_median_interval_and_verdict() -> None:
    """It is what `python -m benchmarks` prints last, made from the records in results/."""
    line = check_line(Check("stall / copy", 1.5, [1.25, 1.0, 1.75], counts=False).record())
    assert line.split() == [
        "<=",
        "1.5",
        "1.25",
        "(1",
        "-",
        "1.75)",
        "within",
        "noise,",
        "does",
        "not",
        "count",
        "stall",
        "/",
        "copy",
    ]
    assert check_line(Check("images", 2, [3], "MB", at_least=True).record()).split() == [
        ">=",
        "2",
        "3",
        "MB",
        "met",
        "images",
    ]


def test_only_whole_steps_of_a_turn_count() -> None:
    """A step that was frozen lasted as long as the other's turn."""
    beginnings = [0.0, 9.0, 11.0, 12.0, 14.0, 30.0]
    assert mean_step_s(beginnings, 10.0, 15.0) == pytest.approx(1.5)
    with pytest.raises(RuntimeError, match="no whole step"):
        mean_step_s(beginnings, 15.0, 29.0)


class Recorded:
    """A training whose turns took these times."""

    def __init__(self, turns: list[float]) -> None:
        self._turns = iter(turns)

    def turn(self, _: float) -> float:
        return next(self._turns)

    def sent_bytes(self) -> float:
        return 0.0


def test_a_turn_is_compared_with_the_turns_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a machine that becomes slower all the time does not change the ratio, and neither do processes that differ."""
    starts = iter([([1.0, 1.2, 1.4, 1.6], [1.1, 1.3, 1.5]), ([2.0, 2.2, 2.4, 2.6], [2.1, 2.3, 2.5])])

    @contextmanager
    def live(*_: object) -> Iterator[list[Recorded]]:
        yield [Recorded(turns) for turns in next(starts)]

    monkeypatch.setattr(_turns, "live", live)
    nothing: Any = None
    found = _turns.compare(nothing, nothing, 1.0, pairs=3, starts=2)
    assert found.ratios == pytest.approx([1.0] * 6)
    assert (found.plain_s[4], found.ours_s[3]) == (2.0, 2.1)


@pytest.mark.parametrize("function", [function for functions in PARTS.values() for function in functions])
def test_the_functions_of_each_part_of_a_step_exist(function: str) -> None:
    """A function that has another name now would count for everything else."""
    module, _, path = function.partition(":")
    assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module)))


def _outer() -> None:
    time.sleep(0.02)
    _inner()


def _inner() -> None:
    time.sleep(0.05)


def test_time_counts_for_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moment counts once: the parts add up to the step."""
    for function in ("_outer", "_inner"):  # restored at the end
        monkeypatch.setattr(f"{__name__}.{function}", globals()[function])
    seconds = memoryview(bytearray(8 * len(ALL))).cast("d")
    switch = new_switch(seconds)
    replace(f"{__name__}:_outer", 0, switch)
    replace(f"{__name__}:_inner", 1, switch)
    began = time.perf_counter()
    _outer()
    time.sleep(0.03)
    switch(ALL.index(REST))
    assert seconds[0] >= 0.02 and seconds[1] >= 0.05 and seconds[ALL.index(REST)] >= 0.03
    assert sum(seconds) == pytest.approx(time.perf_counter() - began, abs=0.02)


@pytest.mark.parametrize(
    ("status", "verdict", "end"),
    [
        (0, MET, "failed: none; over a limit: none"),
        (1, MISSED, "failed: none; over a limit: status"),
        (1, MET, "failed: status; over a limit: none"),
    ],
)
def test_the_exit_status_of_all(
    status: int,
    verdict: str,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`make bench` must not end well when a benchmark did not, or missed its limit."""

    def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[bytes]:
        check = {"what": "a step", "limit": 1, "unit": "s", "at_least": False, "median": 2, "low": 2, "high": 2}
        results = {"checks": [{**check, "counts": True, "verdict": verdict}]}
        (tmp_path / "status.json").write_text(json.dumps(results))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "status"])
    assert everything.main() == status
    assert capsys.readouterr().out.splitlines()[-1].endswith(end)

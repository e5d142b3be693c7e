"""checkpoint.every_minutes=auto: the interval follows what a save costs and how often the run fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from laststep.checkpoint import interval
from laststep.checkpoint.interval import LEAST_S, MOST_S, NODE_MTBF_S, AutoInterval, daly
from laststep.cli.verify import inspect
from laststep.records.attempt_record import EndedAttempt
from laststep.tasks.classification import Classification
from tests.support.ranks import Attempt
from tests.support.records import ended_attempt
from tests.support.runs import config

HOUR = 3600.0


class Hasty(Classification):
    """Saves at each progress line until the cost of a save is known."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        interval.LEAST_S = 0.0
        return super().datasets()


def end(reason: str, hours: float, steps: int = 100, lost: int = 0, nodes: int = 4) -> EndedAttempt:
    """An attempt's record."""
    hosts = [f"n{node}" for node in range(nodes)]
    times = {"start": 1e9, "end": 1e9 + hours * HOUR, "start_step": 50, "end_step": 50 + steps}
    return ended_attempt(reason=reason, hosts=hosts, lost_steps=lost, **times)


def auto_interval(*ends: EndedAttempt, nodes: int = 4, cost_s: float = 10.0) -> AutoInterval:
    """An AutoInterval that has measured one save, which cost only a stall of `cost_s`."""
    auto = AutoInterval(ends, nodes, say=lambda line: None)
    auto.add_stall(cost_s)
    auto.add_steps(10, 1.0, saving=False)
    return auto


def test_it_is_the_best_for_what_the_run_has_seen() -> None:
    """Two failures in 8 hours on 4 nodes: one in 4 hours, and on 8 nodes one in 2. Ends that lose no step are no
    reason to save, nor is a crash before the first step, say from a wrong path; a preemption that lost steps is."""
    seen = [end("lost", 3, lost=70), end("preempted", 2), end("timeout", 1), end("cancelled", 1), end("hung", 1)]
    assert auto_interval(*seen).seconds == pytest.approx(daly(10, 4 * HOUR), rel=1e-3)
    assert auto_interval(*seen, nodes=8).seconds == pytest.approx(daly(10, 2 * HOUR), rel=1e-3)
    assert auto_interval(*seen, end("failed", 0, steps=0)).seconds == pytest.approx(daly(10, 4 * HOUR), rel=1e-3)
    assert auto_interval(*seen, end("preempted", 0, lost=9)).seconds == pytest.approx(daly(10, 8 / 3 * HOUR), rel=1e-3)


def test_before_the_first_failure_it_uses_published_figures() -> None:
    """A run that waited for its own first failure would lose the most in it."""
    assert auto_interval(nodes=512).seconds == pytest.approx(daly(10, NODE_MTBF_S / 512), rel=1e-3)
    assert auto_interval(end("preempted", 48), nodes=512).seconds == auto_interval(nodes=512).seconds


def test_it_stays_within_bounds() -> None:
    """A run neither saves all the time nor risks a day on an estimate. The first save comes soon, before its cost is
    known: after hours it would be late to learn that the disk accepts none."""
    assert AutoInterval([], 4, say=print).seconds == LEAST_S
    assert auto_interval(end("lost", 0.01)).seconds == LEAST_S
    assert auto_interval(nodes=1, cost_s=100).seconds == MOST_S


def test_the_cost_of_a_save_is_all_that_the_loop_loses_by_it() -> None:
    """Most of it is not the stall but the steps that are slower beside the write. A single outlier does not count."""
    said: list[str] = []
    auto = AutoInterval([end("lost", 8)], 4, said.append)
    auto.add_steps(100, 10.0, saving=False)
    for _ in range(3):
        auto.add_stall(1.0)
        auto.add_steps(20, 4.0, saving=True)
        auto.add_steps(20, 5.0, saving=True)
        auto.add_steps(100, 10.0, saving=False)
    best = daly(1 + 9 - 4, 8 * HOUR)
    assert auto.seconds == pytest.approx(best, rel=1e-3)
    assert said == [
        f"saving every {best / 60:.3g} min: a save costs 6 s, mean time between failures 8.0 h (4 nodes; 1 so far)"
    ]
    auto.add_stall(1000.0)
    auto.add_steps(100, 10.0, saving=False)
    assert auto.seconds == pytest.approx(best, rel=1e-3) and len(said) == 1


def test_saves_that_end_after_the_next_is_due_become_rarer() -> None:
    """On a disk that is too slow every save waits for the previous one, and no step runs without a save beside it. Then
    the cost is the wait."""
    auto = AutoInterval([end("lost", 8)], 4, say=lambda line: None)
    for _ in range(3):
        auto.add_stall(60.0)
        auto.add_steps(600, 60.0, saving=True)
    assert auto.seconds == pytest.approx(daly(60, 8 * HOUR), rel=1e-3)


def test_a_run_chooses_its_interval(tmp_path: Path) -> None:
    """Two ranks: by the second save the cost of the first is known. Rank 0's interval applies to both ranks, and its
    log gives the reasons."""
    options = (
        "task=tests.checkpoint.test_interval.Hasty",
        "checkpoint.every_minutes=auto",
        "checkpoint.every_epochs=null",
    )
    attempt = Attempt(config(tmp_path, "auto", 2, (*options, "train.epochs=6", "checkpoint.keep_last=99")))
    lost = end("lost", 1e4, lost=150, nodes=1)  # all of its steps: there is no checkpoint
    (attempt.run.path / "attempts.jsonl").write_text(json.dumps(lost) + "\n")
    assert attempt.wait() == [0, 0], attempt.output()
    assert [checkpoint["step"] for checkpoint in inspect(attempt.run)] == [3, 6, 42]
    # Again when the measured cost of a save changes much, as on a busy machine.
    lines = [line for line in attempt.logs[0].read_text().splitlines() if "saving every" in line]
    assert lines
    assert all(line.endswith("s, mean time between failures 10,000.0 h (1 node; 1 so far)") for line in lines)
    assert "saving every" not in attempt.logs[1].read_text()

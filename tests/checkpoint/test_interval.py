"""checkpoint.every_minutes=auto: the interval follows what a save costs and how often the run fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.support.ranks import Attempt
from tests.support.runs import config
from trainer.checkpoint import interval
from trainer.checkpoint.goodput import NODE_MTBF_S, daly
from trainer.checkpoint.interval import LEAST_S, MOST_S, AutoInterval
from trainer.commands.verify import inspect
from trainer.tasks.classification import Classification

HOUR = 3600.0


class Hasty(Classification):
    """Saves at each progress line until it is known what a save costs."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        interval.LEAST_S = 0.0
        return super().datasets()


def end(reason: str, hours: float, steps: int = 100, lost: int = 0, nodes: int = 4) -> dict[str, Any]:
    """An attempt's record, as far as it matters here."""
    hosts = [f"n{node}" for node in range(nodes)]
    times = {"start": 1e9, "end": 1e9 + hours * HOUR, "start_step": 50, "end_step": 50 + steps}
    return {"reason": reason, "hosts": hosts, "lost_steps": lost, **times}


def auto_interval(*ends: dict[str, Any], nodes: int = 4, cost_s: float = 10.0) -> AutoInterval:
    """After a save that only stood still for so long."""
    auto = AutoInterval(ends, nodes, say=lambda line: None)
    auto.stood_still(cost_s)
    auto.stepped(10, 1.0, saving=False)
    return auto


def test_it_is_the_best_for_what_the_run_has_seen() -> None:
    """Two failures in 8 hours of 4 nodes: one in 4 hours, and on twice as many nodes one in 2. What keeps every step is
    no reason to save; nor is a crash before the first one, of a wrong path say; a preemption that lost steps is."""
    seen = [end("lost", 3, lost=70), end("preempted", 2), end("timeout", 1), end("cancelled", 1), end("hung", 1)]
    assert auto_interval(*seen).seconds == pytest.approx(daly(10, 4 * HOUR), rel=1e-3)
    assert auto_interval(*seen, nodes=8).seconds == pytest.approx(daly(10, 2 * HOUR), rel=1e-3)
    assert auto_interval(*seen, end("failed", 0, steps=0)).seconds == pytest.approx(daly(10, 4 * HOUR), rel=1e-3)
    assert auto_interval(*seen, end("preempted", 0, lost=9)).seconds == pytest.approx(daly(10, 8 / 3 * HOUR), rel=1e-3)


def test_before_the_first_failure_it_goes_by_what_others_have_seen() -> None:
    """A run that waited for its own first failure would lose the most at it."""
    assert auto_interval(nodes=512).seconds == pytest.approx(daly(10, NODE_MTBF_S / 512), rel=1e-3)
    assert auto_interval(end("preempted", 48), nodes=512).seconds == auto_interval(nodes=512).seconds


def test_it_stays_within_bounds() -> None:
    """Neither does a run save without end, nor does it risk a day on an estimate. Until it is known what a save costs,
    one comes soon: after hours it would be late to learn that the disk takes none."""
    assert AutoInterval([], 4, say=print).seconds == LEAST_S
    assert auto_interval(end("lost", 0.01)).seconds == LEAST_S
    assert auto_interval(nodes=1, cost_s=100).seconds == MOST_S


def test_the_cost_of_a_save_is_all_that_the_loop_loses_by_it() -> None:
    """Most of it is not the stall: the steps beside the write are slower. One odd save does not count."""
    said: list[str] = []
    auto = AutoInterval([end("lost", 8)], 4, said.append)
    auto.stepped(100, 10.0, saving=False)
    for _ in range(3):
        auto.stood_still(1.0)
        auto.stepped(20, 4.0, saving=True)
        auto.stepped(20, 5.0, saving=True)
        auto.stepped(100, 10.0, saving=False)
    best = daly(1 + 9 - 4, 8 * HOUR)
    assert auto.seconds == pytest.approx(best, rel=1e-3)
    assert said == [
        f"saving every {best / 60:.3g} min: a save costs 6 s, a failure comes every 8.0 h (4 nodes; 1 so far)"
    ]
    auto.stood_still(1000.0)
    auto.stepped(100, 10.0, saving=False)
    assert auto.seconds == pytest.approx(best, rel=1e-3) and len(said) == 1


def test_saves_that_never_end_before_the_next_come_less_often() -> None:
    """On a disk that is too slow every save waits for the one before, and there is no step without a save beside it:
    then the wait is what one costs."""
    auto = AutoInterval([end("lost", 8)], 4, say=lambda line: None)
    for _ in range(3):
        auto.stood_still(60.0)
        auto.stepped(600, 60.0, saving=True)
    assert auto.seconds == pytest.approx(daly(60, 8 * HOUR), rel=1e-3)


def test_a_run_chooses_its_interval(tmp_path: Path) -> None:
    """Two ranks: at the second save it is known what the first cost. Rank 0's answer holds for both, and its log says
    why."""
    options = (
        "task=tests.checkpoint.test_interval.Hasty",
        "checkpoint.every_minutes=auto",
        "checkpoint.every_epochs=null",
    )
    attempt = Attempt(config(tmp_path, "auto", 2, (*options, "train.epochs=6", "checkpoint.keep_last=99")))
    (attempt.run.path / "attempts.jsonl").write_text(json.dumps({**end("lost", 1e4, nodes=1), "attempt": 0}) + "\n")
    assert attempt.wait() == [0, 0], attempt.output()
    assert [checkpoint["step"] for checkpoint in inspect(attempt.run)] == [3, 6, 42]
    (line,) = [line for line in attempt.logs[0].read_text().splitlines() if "saving every" in line]
    assert line.endswith("s, a failure comes every 10,000.0 h (1 node; 1 so far)")
    assert "saving every" not in attempt.logs[1].read_text()

"""Who keeps the others waiting: a user with 64 ranks looks into one log, the one that is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer.world.watchdog import Beat, name_stuck, straggler

WAITS = "_engine_run_backward (/env/lib/torch/autograd/graph.py:829)"
LOADS = "__getitem__ (/home/me/my_data.py:12)"


def beats(*ranks: tuple[int, str]) -> list[Beat]:
    """A beat per rank, from (progress, where)."""
    return [Beat(f"n{rank}", 7, progress, "training", where, 0.0) for rank, (progress, where) in enumerate(ranks)]


def test_a_silent_rank_is_named_first() -> None:
    """It can say nothing for itself, and where it was last seen is no longer true for sure."""
    said = name_stuck(beats((5, WAITS), (5, LOADS), (5, WAITS)), silent=[2])
    assert said == f"rank 2 on n2 gives no sign of life, last seen in {WAITS}"


def test_the_rank_that_is_behind_is_named() -> None:
    """The others are one step ahead already, waiting in its first collective."""
    said = name_stuck(beats((6, WAITS), (5, WAITS), (6, LOADS)), silent=[])
    assert said == f"rank 1 on n1 is stuck in {WAITS}"


def test_among_equals_the_one_that_is_not_waiting_is_named() -> None:
    """All are in the same step: those in torch wait in a collective, the one in the user's own code is stuck there."""
    assert name_stuck(beats((5, WAITS), (5, LOADS)), silent=[]) == f"rank 1 on n1 is stuck in {LOADS}"
    both = name_stuck(beats((5, WAITS), (5, WAITS)), silent=[])
    assert "rank 0 on n0" in both and "rank 1 on n1" in both, "who cannot be told apart are both named"


def named(busy_s: Sequence[float], steps: int = 100) -> str | None:
    """Whom a minute of so many steps accuses, when each rank was busy for so many seconds of it."""
    before = beats(*[(5, WAITS)] * len(busy_s))
    after = [replace(beat, progress=5 + steps, busy_s=seconds) for beat, seconds in zip(before, busy_s)]
    return straggler(before, after, seconds=60)


def test_stragglers() -> None:
    """One slow disk or throttled GPU slows every rank down; but a rank is accused only when it costs a tenth of the
    time or more, or every log would be full of it."""
    accused = "rank 2 on n2 is slowing the others down: 0.55 s of its own work per step, the median rank 0.2 s"
    assert named([20.0, 20.0, 55.0, 21.0]) == accused
    assert str(named([20.0, 45.0], steps=1)).startswith("rank 1 on n1 is slowing the others down: 45 s")
    assert named([20.0, 21.0, 22.0, 30.0]) is None
    assert named([0.1, 0.1, 4.0, 0.1]) is None
    assert named([30.0]) is None

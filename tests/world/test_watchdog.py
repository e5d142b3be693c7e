"""The watchdog names the rank that the others wait for: a user with 64 ranks reads one log, that rank's."""

from __future__ import annotations

import faulthandler
import queue
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.support.worlds import a_world
from trainer.world import watchdog
from trainer.world.watchdog import Beat, Fault, Probes, Watchdog, name_stuck, straggler

WAITS = "_engine_run_backward (/env/lib/torch/autograd/graph.py:829)"
LOADS = "__getitem__ (/home/me/my_data.py:12)"


def beats(*ranks: tuple[int, str]) -> list[Beat]:
    """A beat per rank, from (progress, where)."""
    return [Beat(f"n{rank}", 7, progress, "training", where, 0.0) for rank, (progress, where) in enumerate(ranks)]


def test_a_silent_rank_is_named_first() -> None:
    """It cannot report anything itself, and may no longer be where it was last seen."""
    named = name_stuck(beats((5, WAITS), (5, LOADS), (5, WAITS)), silent=[2])
    assert named == f"rank 2 on n2 gives no sign of life, last seen in {WAITS}"


def test_the_rank_that_is_behind_is_named() -> None:
    """The others are one step ahead, waiting in that step's first collective."""
    named = name_stuck(beats((6, WAITS), (5, WAITS), (6, LOADS)), silent=[])
    assert named == f"rank 1 on n1 is stuck in {WAITS}"


def test_among_equals_the_one_that_is_not_waiting_is_named() -> None:
    """All ranks are in the same step: those in torch wait in a collective, the one in the user's code is stuck."""
    assert name_stuck(beats((5, WAITS), (5, LOADS)), silent=[]) == f"rank 1 on n1 is stuck in {LOADS}"
    both = name_stuck(beats((5, WAITS), (5, WAITS)), silent=[])
    assert "rank 0 on n0" in both and "rank 1 on n1" in both, "nothing distinguishes them, so both are named"


def slowest(busy_s: Sequence[float], steps: int = 100) -> str | None:
    """The straggler of a minute in which each rank took these `steps` and was busy for this many seconds."""
    before = beats(*[(5, WAITS)] * len(busy_s))
    after = [replace(beat, progress=5 + steps, busy_s=seconds) for beat, seconds in zip(before, busy_s)]
    return straggler(before, after, seconds=60)


def test_stragglers() -> None:
    """One slow disk or throttled GPU slows every rank down. But a rank is named only if it costs more than a tenth of
    the time, or every log would be full of such lines."""
    line = "rank 2 on n2 is slowing the others down: 0.55 s of its own work per step, the median rank 0.2 s"
    assert slowest([20.0, 20.0, 55.0, 21.0]) == line
    assert str(slowest([20.0, 45.0], steps=1)).startswith("rank 1 on n1 is slowing the others down: 45 s")
    assert slowest([20.0, 21.0, 22.0, 30.0]) is None
    assert slowest([0.1, 0.1, 4.0, 0.1]) is None
    assert slowest([30.0]) is None


def test_the_probes_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog gets all it needs when it is made; a fault that is found in every round is handled once, and another
    rank reads it in the store."""
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    handled: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    fault = Fault("signal", "the step takes too long")
    store = dist.HashStore()
    watch = Watchdog(Probes(world=a_world, ticks=lambda: 7, check=lambda: fault), 60, on_fault=handled.put)
    watch.join(store)
    watch.measure(lambda: 1.5)
    try:
        assert handled.get(timeout=60) == fault
        store.wait(["watch/fault", "watch/beat/0"])
    finally:
        watch.close()
    beat = watch._own_beat()
    assert (beat.host, beat.progress, beat.busy_s) == ("here", 7, 1.5)
    assert handled.empty()


def test_reading_and_compiling_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk and a large model's compilation take longer than any timeout: a run that was ended for it would end
    so in every attempt. A main thread that stays in one line, or moves outside of the compiler, makes none."""
    lines = iter(["a", "a", "b", "c", "c", "d", "e"])
    monkeypatch.setattr(watchdog, "_innermost_line", lambda thread: next(lines))
    watch = Watchdog(Probes(world=a_world), 60, on_fault=lambda fault: None)
    try:
        at_rest = watch._own_beat().progress
        assert watch._own_beat().progress == at_rest
        watch.advance(3)
        assert watch._own_beat().progress == at_rest + 3, "the line has changed too, but nothing is being compiled"
        watch.compiling(True)
        assert [watch._own_beat().progress - at_rest for _ in range(2)] == [5, 5]
        watch.compiling(False)
        assert [watch._own_beat().progress - at_rest for _ in range(2)] == [6, 6]
    finally:
        watch.close()


def test_no_timer_is_left_in_a_phase_without_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer in C of an earlier phase would end the process in the middle of a download."""
    armed: list[bool] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: armed.append(True))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(False))
    watch = Watchdog(Probes(world=a_world), 60, on_fault=lambda fault: None)
    try:
        watch.enter("reading checkpoint")
        assert armed[-1]
        watch.enter("preparing data")
        assert not armed[-1]
    finally:
        watch.close()

"""The watchdog names the rank that the others wait for: a user with 64 ranks reads one log, that rank's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laststep.ranks import process, watchdog
from laststep.ranks.fault import Fault
from laststep.ranks.seal import Seal
from laststep.ranks.store import SealedStore
from laststep.ranks.watchdog import Beat, Probes, Watchdog, name_stuck, straggler
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import a_world

WAITS = "_engine_run_backward (/env/lib/torch/autograd/graph.py:829)"
LOADS = "__getitem__ (/home/me/my_data.py:12)"


def beats(*ranks: tuple[int, str]) -> list[Beat]:
    """A beat per rank, from (progress, where)."""
    return [
        Beat(f"n{rank}", 7, progress, "training", where, where == WAITS, 0.0)
        for rank, (progress, where) in enumerate(ranks)
    ]


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


@pytest.mark.parametrize(
    ("file", "waits"),
    [(f"{Path(torch.__file__).parent}/model.py", True), ("/home/me/torch/model.py", False)],
    ids=["torch", "a folder of that name"],
)
def test_where_a_rank_waits_for_others(file: str, waits: bool) -> None:
    """A user's code may lie in a folder named torch. A rank that is stuck there is the one to name."""
    module: dict[str, Any] = {}
    code = "def wait(entered, left):\n    entered.release()\n    left.acquire()\n"
    exec(compile(code, file, "exec"), module)
    entered, left = (threading.Lock() for _ in range(2))  # in C: the function that calls them is the innermost line
    entered.acquire(), left.acquire()
    thread = threading.Thread(target=module["wait"], args=(entered, left))
    thread.start()
    try:
        assert entered.acquire(timeout=DEADLINE_S)
        where, found = watchdog.innermost_line(thread.ident or 0)
        assert where.startswith(f"wait ({file}:") and found is waits
    finally:
        left.release()
        thread.join()


def test_the_rank_whose_device_is_behind_is_named() -> None:
    """Under NCCL the CPUs of all ranks are ahead by the same two steps and wait at the same line. The devices of all
    but one have ended their own work, and wait for that one."""
    waiting = [replace(beat, device=8) for beat in beats((6, WAITS), (6, WAITS), (6, WAITS))]
    waiting[1] = replace(waiting[1], device=7)
    assert name_stuck(waiting, silent=[]) == f"rank 1 on n1 is stuck in {WAITS}"


def test_a_rank_whose_cpu_is_behind_is_named() -> None:
    """It loads data, while the devices of all ranks have done the same steps."""
    waiting = [replace(beat, device=8) for beat in beats((6, WAITS), (5, LOADS), (7, WAITS))]
    assert name_stuck(waiting, silent=[]) == f"rank 1 on n1 is stuck in {LOADS}"


def slowest(busy_s: Sequence[float], steps: int = 100) -> str:
    """The straggler's host in a minute in which each rank took these `steps` and was busy for this many seconds."""
    before = beats(*[(5, WAITS)] * len(busy_s))
    after = [replace(beat, progress=5 + steps, busy_s=seconds) for beat, seconds in zip(before, busy_s)]
    return straggler(before, after, seconds=60)


def test_stragglers(capsys: pytest.CaptureFixture[str]) -> None:
    """One slow disk or throttled GPU slows every rank down. But a rank is named only if it costs more than a tenth of
    the time, or every log would be full of such lines."""
    assert slowest([20.0, 20.0, 55.0, 21.0]) == "n2" and slowest([20.0, 45.0], steps=1) == "n1"
    first, second = capsys.readouterr().out.splitlines()
    assert "rank 2 on n2 is slowing the others down: 0.55 s of its own work per step, the median rank 0.2 s" in first
    assert "rank 1 on n1 is slowing the others down: 45 s" in second
    assert not any(map(slowest, ([20.0, 21.0, 22.0, 30.0], [0.1, 0.1, 4.0, 0.1], [30.0])))
    assert capsys.readouterr().out == ""


def test_a_slow_node_is_blamed_for_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are stuck alike, in a collective: the only evidence is who made the others wait before."""
    reported: list[Fault] = []
    watch = Watchdog(Probes(world=lambda: a_world(size=2)), hang_timeout_s=1.0, on_fault=lambda _: None)
    monkeypatch.setattr(watch, "report", reported.append)
    monkeypatch.setattr(watchdog, "SLOW_WINDOW_S", 0.0)
    try:
        watch.phase = "training"
        for step in range(3):
            took = [
                replace(beat, busy_s=step * own_s) for beat, own_s in zip(beats((step, WAITS), (step, WAITS)), (1, 9))
            ]
            watch._compare([replace(beat, round=step) for beat in took])
        for number in range(4):
            watch._compare([replace(beat, round=10 + number) for beat in took])
    finally:
        watch.close()
    assert reported[0].reason == "hung" and reported[0].blames == "n1"


def test_a_failed_device_is_reported() -> None:
    """Every call on the device repeats its error, but a main thread that waits for a collective calls nothing."""
    handled: queue.SimpleQueue[Fault] = queue.SimpleQueue()

    def passed() -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    watch = Watchdog(Probes(world=a_world), 60, on_fault=handled.put)
    watch.follow(passed)
    try:
        fault = handled.get(timeout=60)
    finally:
        watch.close()
    assert fault.reason == "failed" and fault.cause
    assert fault.text.startswith("rank 0 on here failed:\nCUDA error: an illegal memory access")


def test_a_device_that_works_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long step: the CPU has queued it, and waits. The device moves on within it."""
    handled: list[Fault] = []
    watch = Watchdog(Probes(world=lambda: a_world(size=2)), hang_timeout_s=1.0, on_fault=handled.append)
    try:
        watch.phase = "training"
        for device in range(10):
            watch._compare([replace(beat, device=device, round=device) for beat in beats((6, WAITS), (6, WAITS))])
        assert not handled
        for _ in range(3):
            watch._compare([replace(beat, device=9, round=9) for beat in beats((6, WAITS), (6, WAITS))])
    finally:
        watch.close()
    assert watch._faulted.locked(), "the same, and nothing moves"


def test_a_rank_that_shows_activity_does_not_hang() -> None:
    """A framework writes for longer than the timeout, in one call. That its files grow says nothing about which rank is
    behind."""
    handled: list[Fault] = []
    watch = Watchdog(Probes(world=lambda: a_world(size=2)), hang_timeout_s=1.0, on_fault=handled.append)
    try:
        watch.phase = "training"
        for sign in range(10):
            zero, one = (replace(beat, round=sign) for beat in beats((6, LOADS), (6, WAITS)))
            watch._compare([replace(zero, activity=sign), one])
        assert not handled
        for number in range(4):
            watch._compare([replace(beat, activity=9, round=10 + number) for beat in beats((6, LOADS), (6, WAITS))])
    finally:
        watch.close()
    assert watch._faulted.locked(), "nothing grows any more"
    assert name_stuck([replace(zero, activity=9), one], silent=[]).startswith("rank 0 on n0")


def test_the_probes_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog gets all it needs when it is made; a fault that is found in every round is handled once, and another
    rank reads it in the store."""
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    handled: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    fault = Fault("signal", "the step takes too long")
    seal = Seal()
    store = SealedStore(dist.HashStore(), seal)
    watch = Watchdog(Probes(world=a_world, ticks=lambda: 7, check=lambda: fault), 60, on_fault=handled.put)
    watch.join(store, "here", seal)
    watch.measure(lambda: 1.5)
    try:
        assert handled.get(timeout=60) == fault
        store.wait(["watch/fault", "watch/beat/0"], timedelta(seconds=DEADLINE_S))
    finally:
        watch.close()
    beat = watch._own_beat()
    assert (beat.host, beat.progress, beat.busy_s) == ("here", 7, 1.5)
    assert handled.empty()


@pytest.mark.parametrize("refusals", [2, 1000])
def test_a_fault_while_no_thread_can_be_started(refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is at its limit of processes, which counts threads too. A survivor that gave up at that would save
    nothing, and its attempt would have no end."""
    monkeypatch.setattr(process, "START_S", 0.2)
    monkeypatch.setattr(process, "PAUSE_S", 0.01)
    faults: list[Fault] = []
    dog = Watchdog(Probes(world=lambda: a_world()), 60, faults.append)
    start, left = threading.Thread.start, [refusals]

    def refused(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    dog.report(Fault("failed", "rank 1 has ended"))
    wait_until(lambda: faults, "the end by fault has not begun")
    monkeypatch.undo()
    dog.close()


class Silence:
    """Rank 0's watchdog, which hears its own heartbeats and none of rank 1, whose process is `other` on `host`."""

    def __init__(self, other: str, host: str = "here", grace_s: float = 30) -> None:
        probes = Probes(world=lambda: a_world(size=2), grace_s=lambda: grace_s)
        self.watch = Watchdog(probes, 600, on_fault=lambda fault: None)
        self.watch.close()  # the test does its rounds
        self.other = Beat(host, 7, 5, "training", LOADS, False, 0.0, other)
        self.round = 0
        self.pass_s(0.5)

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds / watchdog.BEAT_S)):
            self.round += 1
            self.watch._compare(
                [Beat("here", self.round, 5, "training", WAITS, True, 0.0, process.identity()), self.other]
            )

    def dead(self, in_a_hurry: bool = False) -> bool:
        return self.watch.is_dead(1, in_a_hurry)


def test_a_starved_rank_is_not_dead() -> None:
    """A host with too much to do: a rank's heartbeats come many seconds late. It used to be given up after five, and a
    healthy attempt ended."""
    here = Silence(process.identity())
    here.pass_s(14)
    assert not here.dead() and not here.dead(in_a_hurry=True)
    here.pass_s(300)
    assert not here.dead(), "its process runs; if it is stuck for good, launch.hang_timeout_s ends the attempt"
    assert here.dead(in_a_hurry=True), "after a signal the others save without it"
    elsewhere = Silence("1 1", host="n2")
    elsewhere.pass_s(50)
    assert not elsewhere.dead()
    elsewhere.pass_s(20)
    assert elsewhere.dead(), "on another node nothing but its silence is known"


def test_a_short_grace_period() -> None:
    """With a KillWait of 15 s, a rank that waited for 15 s in the save of a stop was killed before it gave up on a dead
    one, and the steps since the last save were lost (seen)."""
    silence = Silence("1 1", host="n2", grace_s=15)
    silence.pass_s(6)
    assert not silence.dead(in_a_hurry=True)
    silence.pass_s(1.5)
    assert silence.dead(in_a_hurry=True) and not silence.dead()


def test_reading_and_compiling_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk and a large model's compilation take longer than any timeout: a run that was ended for it would end
    so in every attempt. A main thread that stays in one line, or moves outside of the compiler, makes none."""
    lines = iter(["a", "a", "b", "c", "c", "c", "d", "e"])
    monkeypatch.setattr(watchdog, "innermost_line", lambda thread: (next(lines), False))
    cpu_s = iter([1.0, 1.01, 1.5, 1.5])  # of the C++ compiler; one that hangs uses none
    monkeypatch.setattr(watchdog, "cpu_s_of_descendants", lambda _: next(cpu_s))
    watch = Watchdog(Probes(world=a_world), 60, on_fault=lambda fault: None)
    try:
        at_rest = watch._own_beat().progress
        assert watch._own_beat().progress == at_rest
        watch.advance(3)
        assert watch._own_beat().progress == at_rest + 3, "the line has changed too, but nothing is being compiled"
        watch.compiling(True)
        assert [watch._own_beat().progress - at_rest for _ in range(3)] == [5, 5, 6]
        watch.compiling(False)
        assert [watch._own_beat().progress - at_rest for _ in range(2)] == [7, 7]
    finally:
        watch.close()


def test_no_sign_is_due_in_a_phase_without_a_timeout() -> None:
    """The one that was due in an earlier phase would end the process in the middle of a download."""
    due: list[bool] = []
    watch = Watchdog(Probes(world=a_world, sign=due.append), 60, on_fault=lambda fault: None)
    found = []
    try:
        for phase in ("reading checkpoint", "preparing data", "training"):
            watch.enter(phase)
            found.append(due[-1])
    finally:
        watch.close()
    assert found == [True, False, True]
    assert not due[-1], "nor once the attempt has ended: what then takes long has a deadline of its own"

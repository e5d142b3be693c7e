"""The watchdog: an attempt in which a rank died or is stuck ends, and says which one and where.

Two threads in each rank. One beats: it tells the store how far its rank is, and hears from it of a fault that another
rank has reported; rank 0's also compares all beats. The other one watches: it notices when the store no longer answers
(then rank 0 is gone) and when the grace after a signal runs out. Neither costs the training loop anything.

Silence is counted in rounds of the listener, not in seconds of a clock, so a clock that was set, or a process that was
halted as a whole for a while, makes nobody look dead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainer.say import say
from trainer.world.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from trainer.world.group import Group

BEAT_S = 0.5
SLOW_WINDOW_S = 60.0


@dataclass(frozen=True)
class Fault:
    """Why an attempt cannot end in the orderly way."""

    reason: str  # failed, hung, or signal: the grace after one is running out
    text: str  # what happened, where, on one line or with a traceback
    cause: bool = True  # not merely what another rank's fault has caused here
    retry: bool = True  # False for what would only fail again


@dataclass(frozen=True)
class Beat:
    """A sign of life of one rank."""

    host: str
    round: int
    progress: int  # units of work begun so far
    phase: str
    where: str  # the innermost line of the main thread
    busy_s: float  # spent so far on its own work, not on waiting for others


class Watchdog:
    """Watches one attempt from this rank. `on_fault` is called once, in a thread of its own."""

    # In these nobody can say how long is too long: a download may take hours.
    PATIENT = ("starting", "preparing data")

    def __init__(self, world: World, hang_timeout_s: float, on_fault: Callable[[Fault], None]) -> None:
        self.world = world
        self.phase = "starting"
        self.ticks: Callable[[], int] = lambda: 0
        self.busy: Callable[[], float] = lambda: 0.0
        self.grace_over: Callable[[], Fault | None] = lambda: None
        self.given_up: Callable[[], bool] = lambda: False
        self._phases = 0
        self._timeout_s = hang_timeout_s
        self._on_fault = on_fault
        self._store: dist.Store | None = None
        self._reports: dist.Store | None = None
        self._round = 0
        self._unanswered_s = 0.0
        self._silent_s = [0.0] * world.size  # rank 0's view of each rank
        self._still_s = 0.0  # since any rank made progress
        self._beats: list[Beat] = []
        self._window: tuple[float, list[Beat]] | None = None
        self._faulted = threading.Lock()
        self._closed = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._threads: list[threading.Thread] = []
        self._begin("watch", self._watch)

    def join(self, group: Group) -> None:
        """The ranks have met: begin to beat."""
        self.world = group.world
        # A client of TCPStore serves one caller at a time.
        self._store, self._reports = group.store.clone(), group.store.clone()
        self._begin("beat", self._beat)

    def enter(self, phase: str) -> None:
        """The rank comes to the next part of the attempt; that counts as progress."""
        self.phase = phase
        self._phases += 1
        self._arm()

    def silent(self, rank: int, seconds: float) -> bool:
        """Whether that rank has given no sign of life for so long; known to rank 0 alone."""
        return self._silent_s[rank] >= seconds

    def report(self, fault: Fault) -> None:
        """Tell every rank. The first report stands."""
        if not self._closed.is_set():
            # Beside what follows: the store may be what has failed, and then not even say so for a long time.
            self._begin("report", lambda: self._publish(fault))
            self._raise(fault)

    def close(self) -> None:
        """Stop watching: the rank has nothing left to do with the others."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(timeout=5)

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _publish(self, fault: Fault) -> None:
        if self._reports is not None:
            with contextlib.suppress(Exception):
                self._reports.compare_set("watch/fault", "", json.dumps(asdict(fault)))

    def _raise(self, fault: Fault) -> None:
        if not self._closed.is_set() and self._faulted.acquire(blocking=False):
            threading.Thread(target=self._on_fault, args=(fault,), name="fault", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._arm()
            if (fault := self.grace_over()) is not None:
                self.report(fault)
            if self._store is not None:
                self._unanswered_s += BEAT_S
                if self._too_long(self._unanswered_s):
                    host = self.world.host_of(0)
                    self._raise(Fault("hung", f"rank 0 on {host} has not answered for {self._unanswered_s:.0f} s"))

    def _too_long(self, silence_s: float) -> bool:
        """Whether to wait no longer for who is silent.

        Where a network came apart, both sides wait, and neither hears the other's report. In doubt, a rank asks whether
        another has given up, so that all of them end the attempt together.
        """
        return silence_s > self._timeout_s or (silence_s > self._timeout_s / 2 and self.given_up())

    def _arm(self) -> None:
        """Should user code hold the interpreter's lock for ever, no thread of Python's runs again; this one is in C."""
        if self.phase not in self.PATIENT:
            faulthandler.dump_traceback_later(2 * self._timeout_s, exit=True)

    def _beat(self) -> None:
        assert self._store is not None
        keys = [f"watch/beat/{rank}" for rank in range(self.world.size)]
        all_here = False
        try:
            while not self._closed.is_set():
                self._round += 1
                self._store.set(keys[self.world.rank], json.dumps(asdict(self._sign_of_life())))
                if self._store.check(["watch/fault"]):
                    self._raise(Fault(**json.loads(self._store.get("watch/fault"))))
                if self.world.rank == 0 and (all_here := all_here or self._store.check(keys)):
                    self._compare([Beat(**json.loads(beat)) for beat in self._store.multi_get(keys)])
                self._unanswered_s = 0.0
                self._closed.wait(BEAT_S)
        except Exception as error:  # of the store: whatever it is, it no longer connects the ranks
            self._raise(Fault("failed", f"rank 0 on {self.world.host_of(0)} is gone ({error})", cause=False))

    def _sign_of_life(self) -> Beat:
        host, progress = self.world.host_of(self.world.rank), self._phases + self.ticks()
        return Beat(host, self._round, progress, self.phase, _innermost(self._main), self.busy())

    def _compare(self, beats: list[Beat]) -> None:
        """Rank 0 looks at everyone's latest beat."""
        before, self._beats = self._beats or beats, beats
        for rank, (old, new) in enumerate(zip(before, beats)):
            self._silent_s[rank] = self._silent_s[rank] + BEAT_S if new.round == old.round else 0.0
        moved = any(new.progress != old.progress for old, new in zip(before, beats))
        patient = any(beat.phase in self.PATIENT for beat in beats)
        self._still_s = 0.0 if moved or patient else self._still_s + BEAT_S
        silent = [rank for rank, seconds in enumerate(self._silent_s) if self._too_long(seconds)]
        if silent or self._still_s > self._timeout_s:
            waited_s = min((self._silent_s[rank] for rank in silent), default=self._still_s)
            self.report(Fault("hung", f"{name_stuck(beats, silent)}, for {waited_s:.0f} s"))
        self._name_straggler(beats)

    def _name_straggler(self, beats: list[Beat]) -> None:
        if self._window is None or self._window[1][0].phase != beats[0].phase:
            self._window = (time.monotonic(), beats)
        since, before = self._window
        seconds = time.monotonic() - since
        if seconds > SLOW_WINDOW_S and beats[0].progress > before[0].progress:
            if slow := straggler(before, beats, seconds):
                say(slow)
            self._window = (time.monotonic(), beats)


def name_stuck(beats: Sequence[Beat], silent: Sequence[int]) -> str:
    """Which ranks keep the others waiting: those that give no sign of life, else those that are behind, else those
    whose main thread is in no library of torch's (where one waits for others)."""
    stuck = list(silent)
    says = "gives no sign of life, last seen in"
    if not stuck:
        says = "is stuck in"
        least = min(beat.progress for beat in beats)
        stuck = [rank for rank, beat in enumerate(beats) if beat.progress == least]
        stuck = [rank for rank in stuck if "/torch/" not in beats[rank].where] or stuck
    return "; ".join(f"rank {rank} on {beats[rank].host} {says} {beats[rank].where}" for rank in stuck)


def straggler(before: Sequence[Beat], after: Sequence[Beat], seconds: float) -> str | None:
    """Names the rank that made the others wait between two beats of each, `seconds` and at least one step apart: it was
    busy with its own work twice as long as the median, and that cost a tenth of the time or more."""
    steps = after[0].progress - before[0].progress
    busy_s = [new.busy_s - old.busy_s for old, new in zip(before, after)]
    slowest = max(range(len(busy_s)), key=lambda rank: busy_s[rank])
    median = statistics.median_low(busy_s)
    late = busy_s[slowest] - median
    if late <= median or late <= 0.1 * seconds:
        return None
    return (
        f"rank {slowest} on {after[slowest].host} holds the others up: {busy_s[slowest] / steps:.3g} s of its own work "
        f"a step, the median rank {median / steps:.3g} s"
    )


def _innermost(thread: int) -> str:
    """Function, file and line that a thread is at."""
    frame: Any = sys._current_frames().get(thread)
    return "?" if frame is None else f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"

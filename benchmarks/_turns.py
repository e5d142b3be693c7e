"""Trainings that take turns on the same cores, so that the machine's drift affects all of them alike.

A virtual machine's speed changes by a third within minutes. So the trainings that are compared live at the same time
and take turns of seconds, while SIGSTOP freezes the others. Their background work, such as the write of a save, is
frozen with them and continues in their own turns. Each training notes when its steps begin. A step that a freeze
interrupts does not count. All others do, also the first after a freeze: the caches are cold for about a millisecond, of
turns of seconds, for every training alike.

Clocks go on during a freeze: what Laststep does every few seconds, it does up to twice as often as in life, so no such
cost is missing. No rank looks dead: the watchdog counts rounds, not seconds.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks._measure import PROJECT
from laststep.ranks.launchers import free_port

CLOCK = "LASTSTEP_BENCHMARK_CLOCK"  # in the environment of rank 0: the file to which it writes when its steps begin
MOST_STEPS = 1 << 22
FIRST_STEPS = 5  # after them a training has started
FEWEST_STEPS = 2  # whole ones, in a turn
WARM_UP, WARM_UP_S = 2, 1.5  # rounds that do not count, and how long their turns take
DEADLINE_S = 300.0


def clock() -> Callable[[], None]:
    """A function that notes that a step begins. It writes to memory that others can read: a file, mapped. Where nobody
    wants to know, as on ranks other than 0, it does nothing."""
    if CLOCK not in os.environ:
        return lambda: None
    times, number = mapped(Path(os.environ[CLOCK])), itertools.count()

    def note() -> None:
        times[next(number)] = time.monotonic()

    return note


def mapped(path: Path) -> memoryview[float]:
    """The numbers in a file, which other processes can see and change meanwhile."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")


class Training:
    """A training in processes of its own: `python -m WORDS` for each rank, with torch's variables (init_method env://)
    if there are several."""

    def __init__(self, words: Sequence[str], ranks: int, env: Mapping[str, str], folder: Path) -> None:
        self._log, path = folder / "log", folder / "clock"  # the log is a file, as in a Slurm job
        with path.open("wb") as file:
            file.truncate(8 * MOST_STEPS)
        self._clock = mapped(path)
        self._seen = 0  # steps begun, as far as anybody has looked
        self._steps = self._sent = 0  # in all turns: steps begun, and bytes sent on the loopback device
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        self.processes = []
        with self._log.open("wb") as log:
            for rank in range(ranks):
                place = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                own = {**os.environ, "OMP_NUM_THREADS": "1", **env, **place, **({} if rank else {CLOCK: str(path)})}
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *words],
                        cwd=PROJECT,
                        env=own,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # so that a signal reaches its children, and Ctrl-C only us
                    )
                )

    def await_start(self) -> None:
        """Wait for the first steps. Raises TimeoutError, or RuntimeError if a rank ends, with the log."""
        self._await_step(FIRST_STEPS)

    def _await_step(self, number: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self._clock[number]:
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step in {DEADLINE_S:.0f} s:\n{self._log.read_text()}")
            time.sleep(0.02)

    def check_alive(self) -> None:
        """Raise RuntimeError, with the log, if a rank has ended."""
        if any(process.poll() is not None for process in self.processes):
            raise RuntimeError(f"a rank has ended too early:\n{self._log.read_text()}")

    def send(self, number: signal.Signals) -> None:
        """Send all its processes a signal."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def turn(self, seconds: float) -> float:
        """Let it train for this long and at least FEWEST_STEPS, then freeze it; returns the mean seconds of a step."""
        before, first, began = _loopback_bytes(), self._steps_begun(), time.monotonic()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self._await_step(first + FEWEST_STEPS)
        ended = time.monotonic()
        self.send(signal.SIGSTOP)
        self.check_alive()
        new = self._clock[first : self._steps_begun()].tolist()
        self._steps += len(new)
        self._sent += _loopback_bytes() - before
        return mean_step_s(new, began, ended)

    def _steps_begun(self) -> int:
        while self._clock[self._seen]:
            self._seen += 1
        return self._seen

    def sent_bytes(self) -> float:
        """Bytes per step that its ranks have sent to each other during its turns. Nothing else should use the loopback
        device meanwhile."""
        return self._sent / max(1, self._steps)

    def stop(self) -> None:
        """Ask its ranks to stop, and wait until they have."""
        self.send(signal.SIGTERM)
        self.wait(DEADLINE_S)

    def wait(self, seconds: float) -> None:
        """Wait until its ranks have ended. Raises subprocess.TimeoutExpired."""
        for process in self.processes:
            process.wait(seconds)

    def end(self) -> None:
        """Kill all its processes."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def mean_step_s(beginnings: Sequence[float], began: float, ended: float) -> float:
    """The mean time of the steps that began and ended within a turn; each step ends as the next one begins."""
    within = [moment for moment in beginnings if began <= moment <= ended]
    if len(within) < 2:
        raise RuntimeError(f"no whole step in a turn of {ended - began:.1f} s")
    return (within[-1] - within[0]) / (len(within) - 1)


class Comparison(NamedTuple):
    """Mean seconds of a step by turn: the plain training's, and in between those of ours. The turns of several
    starts follow one another."""

    plain_s: list[float]  # one more than ours in each start
    ours_s: list[float]
    sent: list[float]  # bytes per step, of both, in the last start
    ratios: list[float]  # each turn of ours compared with the mean of the plain training's turns before and after it


@contextmanager
def live(*starts: Callable[[Path], Training]) -> Iterator[list[Training]]:
    """Start trainings, each with an empty folder, warm them up, freeze them, and kill them in the end."""
    with ExitStack() as stack:
        # So that no training outlives the benchmark, frozen or not, even if the benchmark is terminated.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        trainings = []
        for start in starts:
            trainings.append(start(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            stack.callback(trainings[-1].end)
        for training in trainings:
            training.await_start()
            training.send(signal.SIGSTOP)
        for training in WARM_UP * trainings:
            training.turn(WARM_UP_S)
        yield trainings


def compare(
    plain: Callable[[Path], Training], ours: Callable[[Path], Training], turn_s: float, pairs: int, starts: int = 1
) -> Comparison:
    """Start both, let them take turns, and kill them. Several `starts` help because a process may run a few per cent
    faster or slower than the next one of the same program, for as long as it lives."""
    found = Comparison([], [], [], [])
    for _ in range(starts):
        with live(plain, ours) as (first, second):
            plain_s, ours_s = [first.turn(turn_s)], list[float]()
            for _ in range(pairs):
                ours_s.append(second.turn(turn_s))
                plain_s.append(first.turn(turn_s))
            found.sent[:] = [training.sent_bytes() for training in (first, second)]
        found.plain_s.extend(plain_s)
        found.ours_s.extend(ours_s)
        found.ratios.extend(one / statistics.fmean(two) for one, two in zip(ours_s, pairwise(plain_s)))
    return found

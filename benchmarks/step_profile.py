"""Where the time of a small step goes, in the bare loop and in Laststep: by part of the step, and by thread.

`python -m benchmarks.step_profile [--steps N]`, about four minutes. The trainings are those of benchmarks/overhead.py
with the perceptron, and take turns as there, on 1 and on 2 ranks. Each loop runs twice: as it is, for the time of a
step, and with a clock that is read where a part begins and ends, see benchmarks/_parts.py. Reading the clock takes time
too, so the results have both step times. The CPU time of a thread is the sum over all ranks. Four trainings take turns,
so what Laststep does by the clock, such as saves, it does up to four times as often as in life. There are no limits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _turns
from benchmarks._measure import write_results
from benchmarks._parts import ALL, FOLDER
from benchmarks._turns import Training, mapped
from benchmarks.overhead import RANKS, start

CONTENDERS = ("bare", "laststep")
MODEL = "perceptron"
TURN_S = 1.25
FEWEST_ROUNDS = 8
LEAST_US = 0.2  # of CPU time, for a thread to be named


def main(words: list[str] | None = None) -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.step_profile", description="Where the time of a step goes.")
    parser.add_argument("--steps", type=int, default=10_000, help="steps to measure, at least (default: 10,000)")
    given = parser.parse_args(words)
    results = []
    for ranks in RANKS:
        results.append(profiled(ranks, given.steps))
        _show(results[-1])
    write_results("step_profile", {"model": MODEL, "results": results})
    return 0


def profiled(ranks: int, steps: int) -> dict[str, Any]:
    """What the results keep of the two loops on this many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        loops = [_Loop(Path(folder) / name) for name in CONTENDERS]
        starts = []
        for loop, name in zip(loops, CONTENDERS):
            starts += [partial(start, name, MODEL, ranks, more) for more in ({}, loop.env)]
        with _turns.live(*starts) as trainings:
            while any(len(loop.plain_s) < FEWEST_ROUNDS or loop.steps < steps for loop in loops):
                for number, loop in enumerate(loops):
                    loop.round(*trainings[2 * number : 2 * number + 2])
        return {"ranks": ranks, "loops": {name: loop.record() for loop, name in zip(loops, CONTENDERS)}}


class _Loop:
    """One of the two loops, and what has been measured of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.env = folder, {FOLDER: str(folder)}
        self.plain_s: list[float] = []  # of a step, by turn, as it is
        self._timed_s: list[float] = []  # and with the clock
        self._part_s = [0.0] * len(ALL)  # in all turns, of all ranks
        self._cpu_s: dict[str, float] = defaultdict(float)
        self.steps = 0.0  # with the clock

    def round(self, plain: Training, timed: Training) -> None:
        """A turn as it is, and one with the clock."""
        self.plain_s.append(plain.turn(TURN_S))
        parts, cpu = self._parts(), self._cpu()
        self._timed_s.append(step_s := timed.turn(TURN_S))
        self.steps += TURN_S / step_s
        self._part_s = [a + b - c for a, b, c in zip(self._part_s, self._parts(), parts)]
        for thread, seconds in self._cpu().items():
            self._cpu_s[thread] += seconds - cpu[thread]

    def record(self) -> dict[str, Any]:
        """What the results keep of it: microseconds per step. The parts add up to the step with the clock."""
        timed_us = 1e6 * statistics.fmean(self._timed_s)
        cpu_us = {thread: round(1e6 * seconds / self.steps, 1) for thread, seconds in self._cpu_s.items()}
        return {
            "steps": int(self.steps),
            "step_us": round(1e6 * statistics.fmean(self.plain_s), 1),
            "timed_step_us": round(timed_us, 1),
            "parts_us": {part: round(timed_us * s / sum(self._part_s), 1) for part, s in zip(ALL, self._part_s)},
            "cpu_us": {thread: us for thread, us in sorted(cpu_us.items(), key=lambda of: -of[1]) if us >= LEAST_US},
        }

    def _parts(self) -> Sequence[float]:
        """The seconds that each part has taken so far, of all ranks."""
        return [sum(values) for values in zip(*(mapped(path) for path in self._folder.glob("seconds*")))]

    def _cpu(self) -> dict[str, float]:
        """The seconds of CPU time that each thread has used so far, by name, of all ranks."""
        used: dict[str, float] = defaultdict(float)
        for path in self._folder.glob("threads*"):
            threads = json.loads(path.read_text())
            for task in Path(f"/proc/{threads['pid']}/task").iterdir():
                name = threads["names"].get(task.name) or (task / "comm").read_text().strip()
                times = (task / "stat").read_text().rpartition(")")[2].split()[11:13]  # utime and stime
                used[name] += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        return used


def _show(figures: dict[str, Any]) -> None:
    """Print the tables of one number of ranks."""
    bare, ours = (figures["loops"][name] for name in CONTENDERS)
    print(f"{figures['ranks']} rank(s), us per step:{'bare':>27} {'laststep':>9} {'more':>9}")
    for key in ("step_us", "timed_step_us"):
        _line(key, bare[key], ours[key])
    for key in ("parts_us", "cpu_us"):
        print(f"  {key}")
        for what in {**ours[key], **bare[key]}:
            _line(what, bare[key].get(what, 0), ours[key].get(what, 0))


def _line(what: str, bare: float, ours: float) -> None:
    print(f"{what:>48} {bare:>9.1f} {ours:>9.1f} {ours - bare:>+9.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

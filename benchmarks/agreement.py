"""The cost per training step of the stop agreement while no stop is requested.

`python -m benchmarks.agreement [--repeats N]`. Two ranks meet as in a run; the threads that wait for a signal and for a
stop notice sleep beside the loop. A loop that calls `begin_tick` alternates with an empty loop. A call must cost less
than a microsecond; if the median misses that by more than the noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import multiprocessing.queues
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._measure import DEADLINE_S, Check, conclude, spread

LIMIT_NS = 1000.0
CALLS = 500_000
Times = dict[str, list[float]]  # nanoseconds per call, or per iteration of the empty loop


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if the agreement costs too much."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.agreement", description="The cost per step of the stop agreement."
    )
    parser.add_argument("--repeats", type=int, default=30, help=f"repeats of {CALLS:,} calls per rank (default: 30)")
    repeats = parser.parse_args(words).repeats
    if repeats < 2:
        parser.error("--repeats must be at least 2")

    ranks = measure(repeats)
    results = [{name: spread(times, 1) for name, times in rank.items()} for rank in ranks]
    print(f"{'median':>8}  {'10-90 %':>11}  {'max':>6}  nanoseconds ({repeats} repeats of {CALLS:,} calls)")
    for rank, rows in enumerate(results):
        for name, s in rows.items():
            print(f"{s['median']:>5.0f} ns  {s['p10']:>4.0f} - {s['p90']:>4.0f}  {s['max']:>6.0f}  rank {rank}: {name}")
    costs = ([call - empty for call, empty in zip(*rank.values())] for rank in ranks)
    check = Check("the agreement, per step", LIMIT_NS, max(costs, key=statistics.median), "ns")
    cost = round(statistics.median(check.values), 1)
    figures = {"repeats": repeats, "calls": CALLS, "unit": "ns", "cost": cost, "ranks": results}
    return conclude("agreement", figures, [check])


def measure(repeats: int) -> list[Times]:
    """The times measured by two ranks that run side by side, by rank."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.queues.Queue[tuple[int, Times]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting.json"
        ranks = [context.Process(target=_rank, args=(rank, meeting, repeats, results)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        try:
            measured = dict(results.get(timeout=DEADLINE_S) for _ in ranks)
        except queue.Empty:
            raise TimeoutError(f"the ranks did not measure within {DEADLINE_S:.0f} s") from None
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()
    return [measured[rank] for rank in range(2)]


def _rank(rank: int, meeting: Path, repeats: int, results: multiprocessing.queues.Queue[tuple[int, Times]]) -> None:
    """The body of a rank's process."""
    import torch

    from laststep.ranks.group import register_rank
    from laststep.ranks.process import Signals
    from laststep.ranks.stop import Stop
    from laststep.ranks.world import World

    signals = Signals.catch()
    world = World(rank, 2, rank, 2, 0, 1, ("localhost",) * 2, "benchmark", 0, "benchmark-0", "benchmark", False)
    group = register_rank(world, torch.device("cpu"), "gloo", meeting, DEADLINE_S)
    group.connect(DEADLINE_S)
    stop = Stop(world, group.store, signals, on_failure=print)
    times: Times = {"begin_tick": [], "empty loop": []}
    for _ in range(repeats):
        times["begin_tick"].append(_nanoseconds(_ticks, stop.begin_tick))
        times["empty loop"].append(_nanoseconds(_nothing, stop.begin_tick))
    waiting = {thread.name for thread in threading.enumerate()}
    assert {"stop", "signals"} <= waiting, f"measured without the waiting threads: {waiting}"
    group.barrier(DEADLINE_S)
    stop.close()
    group.close()
    results.put((rank, times))


def _nanoseconds(loop: Callable[[Callable[[], bool]], None], call: Callable[[], bool]) -> float:
    start = time.perf_counter_ns()
    loop(call)
    return (time.perf_counter_ns() - start) / CALLS


def _ticks(call: Callable[[], bool]) -> None:
    for _ in itertools.repeat(None, CALLS):
        call()


def _nothing(call: Callable[[], bool]) -> None:
    for _ in itertools.repeat(None, CALLS):
        pass


if __name__ == "__main__":
    sys.exit(main())

"""What a training step pays for the ranks' agreement on where to stop, as long as nothing happens.

`python -m benchmarks.agreement [--repeats N]`. Two ranks, met as in a run, with the threads that wait for a signal and
for a notice asleep beside the loop; `begin_tick` is called in a loop, in turns with the same loop doing nothing. A
call must cost less than a microsecond; the exit status says whether it does.
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

from benchmarks._measure import DEADLINE_S, spread, write_results

LIMIT_NS = 1000.0
CALLS = 500_000
Times = dict[str, list[float]]  # nanoseconds of one call, or of one turn of the empty loop


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; 1 when the agreement costs too much."""
    parser = argparse.ArgumentParser(prog="benchmarks.agreement", description="What a step pays for the agreement.")
    parser.add_argument("--repeats", type=int, default=30, help=f"times {CALLS:,} calls per rank (default: 30)")
    repeats = parser.parse_args(words).repeats
    if repeats < 2:
        parser.error("--repeats must be at least 2")

    ranks = measure(repeats)
    results = [{name: spread(times, 1) for name, times in rank.items()} for rank in ranks]
    print(f"{'median':>8}  {'10-90 %':>11}  {'max':>6}  nanoseconds ({repeats} times {CALLS:,} calls)")
    for rank, rows in enumerate(results):
        for name, s in rows.items():
            print(f"{s['median']:>5.0f} ns  {s['p10']:>4.0f} - {s['p90']:>4.0f}  {s['max']:>6.0f}  rank {rank}: {name}")
    cost = max(statistics.median(t["begin_tick"]) - statistics.median(t["empty loop"]) for t in ranks)
    print(f"The agreement costs {cost:.0f} ns a step (less than {LIMIT_NS:.0f} wanted).")
    write_results(
        "agreement", {"repeats": repeats, "calls": CALLS, "unit": "ns", "cost": round(cost, 1), "ranks": results}
    )
    return int(cost >= LIMIT_NS)


def measure(repeats: int) -> list[Times]:
    """What each of two ranks measured, at the same time."""
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

    from trainer.world.group import sign_in
    from trainer.world.signals import Signals
    from trainer.world.stop import Stop
    from trainer.world.world import World

    signals = Signals.catch()
    world = World(rank, 2, rank, 2, 0, 1, ("localhost",) * 2, "benchmark", 0, "benchmark-0", "benchmark", False)
    group = sign_in(world, torch.device("cpu"), "gloo", meeting, DEADLINE_S)
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

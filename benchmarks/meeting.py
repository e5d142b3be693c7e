"""How long ranks take to meet and to agree on a stop, for 2 to 32 ranks.

`python -m benchmarks.meeting [--repeats N]`. The ranks are processes on this machine that have already imported torch.
They share its cores: with more ranks than cores, each additional rank waits for its turn. torch asks the name server
for the name of every address that it connects to. To exclude that, the figures in docs/benchmarks.md were measured
without a reachable name server: `unshare --net sh -c 'ip link set lo up; python -m benchmarks.meeting'`, as root.
    sign in   from the last rank's start until every rank has reached the store and written its card there
    met       from the last rank's start until every rank knows all others and gloo has connected each pair
    stop      from a signal to one rank, while all wait between two steps, until every rank knows the last step
Each time is that of the slowest rank. Growth is the b in time = a * ranks ** b, fitted to the medians; twice the ranks
take 2 ** b times as long.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import multiprocessing.queues
import os
import queue
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks._measure import DEADLINE_S, spread, write_results

SIZES = (2, 4, 8, 16, 32)
PHASES = ("sign in", "met", "stop")
Moments = dict[str, float]  # by phase, and "start" and "signal": time.monotonic(), one clock for all processes


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.meeting", description=str(__doc__).splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="meetings of each size (default: 3)")
    repeats = parser.parse_args(words).repeats
    if repeats < 2:
        parser.error("--repeats must be at least 2")

    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # without a name server, torch warns about each connection
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["laststep.loops.engine"])
    meet(context, 2)  # a warm-up, which starts the fork server and imports torch there
    measured: dict[int, list[Moments]] = {size: [] for size in SIZES}
    for _ in range(repeats):  # sizes alternate, so that other load on this machine affects all of them alike
        for size in SIZES:
            measured[size].append(meet(context, size))
    rows = {
        size: {phase: spread([one[phase] for one in each], 4) for phase in PHASES} for size, each in measured.items()
    }
    growth = {phase: exponent([(size, rows[size][phase]["median"]) for size in SIZES]) for phase in PHASES}

    print(
        f"{'ranks':>5}  " + "".join(f"{phase + ': median, 10-90 %':>30}" for phase in PHASES) + f"  ({repeats} repeats)"
    )
    for size, phases in rows.items():
        cells = [f"{1e3 * s['median']:.0f} ms, {1e3 * s['p10']:.0f}-{1e3 * s['p90']:.0f} ms" for s in phases.values()]
        print(f"{size:>5}  " + "".join(f"{cell:>30}" for cell in cells))
    for phase, power in growth.items():
        print(f"{phase}: grows as ranks ** {power:.2f}; {2**power:.1f} times as long for twice the ranks")
    write_results("meeting", {"repeats": repeats, "unit": "s", "ranks": rows, "growth": growth})
    return 0


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The b of y = a * x ** b, by least squares on logarithms."""
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in points))
    return round(statistics.linear_regression(xs, ys).slope, 2)


def meet(context: ForkServerContext, size: int) -> Moments:
    """Seconds that each phase took on its slowest rank."""
    moments: multiprocessing.queues.Queue[Moments] = context.Queue()
    together = context.Barrier(size)
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting" / "benchmark.json"
        ranks = [context.Process(target=_rank, args=(rank, size, meeting, together, moments)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        try:
            reports = [moments.get(timeout=DEADLINE_S) for _ in ranks]
        except queue.Empty:
            raise TimeoutError(f"{size} ranks did not meet within {DEADLINE_S:.0f} s") from None
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()
    last = {name: max(one[name] for one in reports if name in one) for name in ("start", "signal", *PHASES)}
    return {
        "sign in": last["sign in"] - last["start"],
        "met": last["met"] - last["start"],
        "stop": last["stop"] - last["signal"],
    }


def _rank(
    rank: int, size: int, meeting: Path, together: Barrier, moments: multiprocessing.queues.Queue[Moments]
) -> None:
    """The body of a rank's process."""
    import torch

    from laststep.ranks.group import register_rank
    from laststep.ranks.process import Signals
    from laststep.ranks.stop import Stop
    from laststep.ranks.world import World

    torch.set_num_threads(1)
    signals = Signals.catch()
    world = World(rank, size, rank, size, 0, 1, ("localhost",) * size, "benchmark", 0, "benchmark", "benchmark", False)
    at: Moments = {}
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - messages about the stop do not belong in the table
    together.wait(DEADLINE_S)
    at["start"] = time.monotonic()
    group = register_rank(world, torch.device("cpu"), "gloo", meeting, DEADLINE_S)
    at["sign in"] = time.monotonic()
    group.connect(DEADLINE_S)
    at["met"] = time.monotonic()
    stop = Stop(group.world, group.store, signals, on_failure=print)
    (agreement,) = (thread for thread in threading.enumerate() if thread.name == "stop")
    together.wait(DEADLINE_S)
    time.sleep(0.1)  # the barrier has just woken the ranks: let their threads go back to waiting
    if rank == size - 1:
        at["signal"] = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
    agreement.join(DEADLINE_S)
    at["stop"] = time.monotonic()
    together.wait(DEADLINE_S)
    stop.close()
    group.close()
    moments.put(at)


if __name__ == "__main__":
    sys.exit(main())

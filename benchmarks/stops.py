"""How long a stop takes: from the signal to the exit of all ranks.

`python -m benchmarks.stops [--stops N] [--seed S]`. One run of two ranks is signalled and resumed repeatedly. The
moment (within an epoch: steps, a validation, a periodic save), the rank and the signal are drawn from the seed. A stop
may take the time of one step and of writing the state, plus one second. The step is measured in the same run, the write
by writing the same bytes to one file (write, fsync, rename). If a stop takes longer or loses a step, the exit status
is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._measure import Check, Ranks, conclude, ended, new_run, spread
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir

ALLOWANCE_S = 1.0  # in addition to one step and the write
WRITES = 20
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a stop takes too long or loses a step."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.stops", description="The time from the signal to the exit of all ranks."
    )
    parser.add_argument("--stops", type=int, default=10, help="stops to measure (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed for moments, ranks and signals (default: 0)")
    given = parser.parse_args(words)
    if given.stops < 2:
        parser.error("--stops must be at least 2")

    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), "train.epochs=1000")
        epoch_s = first_epoch(run)
        draw = random.Random(given.seed)
        stops = [stop(run, draw, epoch_s) for _ in range(given.stops)]
        step_s, writes = step_seconds(run), write_seconds(run)
    limit = step_s + statistics.median(writes) + ALLOWANCE_S
    lost = sum(s["lost steps"] for s in stops)

    phases = {name: spread([s[name] for s in stops]) for name in ("last step", "save", "exit", "in all")}
    rows = {"one step": {"median": round(step_s, 4)}, "write": spread(writes, 4)}
    print(f"{'median':>8}  {'95 %':>7}  {'max':>7}  from the signal to the exit of both ranks ({given.stops} stops)")
    for name, s in phases.items():
        print(f"{1000 * s['median']:>5.0f} ms  {1000 * s['p95']:>4.0f} ms  {1000 * s['max']:>4.0f} ms  {name}")
    print(f"One step takes {1000 * step_s:.0f} ms, the write {1000 * rows['write']['median']:.0f} ms.")
    checks = [
        Check("the longest stop", round(limit, 3), [max(s["in all"] for s in stops)], "s"),
        Check("lost steps", 0, [lost]),
    ]
    figures = {"seed": given.seed, "stops": given.stops, "lost_steps": lost, "unit": "s"}
    return conclude("stops", {**figures, **rows, "from the signal": phases}, checks)


def first_epoch(run: RunDir) -> float:
    """Train until the first checkpoint, after one epoch; returns how long the epoch's steps took, in seconds."""
    with ended(Ranks(run)) as ranks:
        ranks.until(lambda: CheckpointStore(run.checkpoints).steps(), "no checkpoint")
        ranks.signal(signal.SIGTERM, 0)
        ranks.wait()
    return step_seconds(run) * CheckpointStore(run.checkpoints).steps()[0]


def stop(run: RunDir, draw: random.Random, epoch_s: float) -> dict[str, Any]:
    """Resume the run and stop it; returns the seconds from the signal to the exit of both ranks, by phase, and the
    number of lost steps."""
    number, rank, moment = draw.choice(SIGNALS), draw.randrange(2), draw.uniform(0, epoch_s)
    with ended(Ranks(run)) as ranks:
        ranks.until(lambda: "resuming after step" in ranks.logs[0].read_text(), "not resumed")
        time.sleep(moment)
        signalled = ranks.signal(number, rank)
        exited = ranks.wait()
    if any(process.returncode != 128 + number for process in ranks.processes):
        raise RuntimeError(f"{number.name} to rank {rank}: not a stop:\n{ranks.output()}")
    store = CheckpointStore(run.checkpoints)
    newest = store.steps()[-1]
    last = [line for line in read_lines(run.metrics) if "loss" in line][-1]
    committed = store.path(newest).stat().st_ctime  # the time of the rename
    # Work that was already done when the signal arrived counts for nothing.
    done = min(max(signalled, last["time"]), exited)
    saved = min(max(done, committed), exited)
    return {
        "last step": done - signalled,
        "save": saved - done,
        "exit": exited - saved,
        "in all": exited - signalled,
        "lost steps": last["step"] - newest,
    }


def step_seconds(run: RunDir) -> float:
    """Median time of one step, from the throughput in metrics.jsonl."""
    batch_size = Config.load(run.config).train.batch_size
    return batch_size / statistics.median(line["samples_per_s"] for line in read_lines(run.metrics) if "loss" in line)


def write_seconds(run: RunDir) -> list[float]:
    """Seconds that this disk takes to write the newest checkpoint's bytes to one file with the simplest commit."""
    newest = max(run.checkpoints.glob("step_*"))
    state = b"".join(file.read_bytes() for file in newest.iterdir())
    taken = []
    for _ in range(WRITES):
        begin = time.perf_counter()
        with (run.path / "state.tmp").open("wb") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        (run.path / "state.tmp").rename(run.path / "state")
        folder = os.open(run.path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        taken.append(time.perf_counter() - begin)
    return taken


if __name__ == "__main__":
    sys.exit(main())

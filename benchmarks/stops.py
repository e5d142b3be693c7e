"""How long a stop takes: from the signal to the exit of all ranks.

`python -m benchmarks.stops [--stops N] [--seed S]`. One run of two ranks is signalled and resumed again and again. The
moment (within an epoch: steps, a validation, a periodic save), the rank and the signal are drawn from the seed. A stop
may take one step, the write of the state and a second more; both are measured in the same run, the write as the same
bytes in one file (write, fsync, rename). The exit status says whether every stop kept to that, and every step was kept.
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

from benchmarks._measure import Ranks, ended, new_run, spread, write_results
from trainer.checkpoint.store import CheckpointStore
from trainer.config.config import Config
from trainer.records.metrics import read_lines
from trainer.rundir import RunDir

ALLOWANCE_S = 1.0  # beyond one step and the write
WRITES = 20
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; 1 when a stop takes too long or loses a step."""
    parser = argparse.ArgumentParser(prog="benchmarks.stops", description="From the signal to the exit of all ranks.")
    parser.add_argument("--stops", type=int, default=20, help="stops to measure (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of their moments, ranks and signals (default: 0)")
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
    late = sum(s["in all"] > limit for s in stops)
    lost = sum(s["lost steps"] for s in stops)

    phases = {name: spread([s[name] for s in stops]) for name in ("last step", "save", "exit", "in all")}
    rows = {"one step": {"median": round(step_s, 4)}, "write": spread(writes, 4)}
    print(f"{'median':>8}  {'95 %':>7}  {'max':>7}  from the signal to the exit of both ranks ({given.stops} stops)")
    for name, s in phases.items():
        print(f"{1000 * s['median']:>5.0f} ms  {1000 * s['p95']:>4.0f} ms  {1000 * s['max']:>4.0f} ms  {name}")
    print(f"One step takes {1000 * step_s:.0f} ms, the write {1000 * rows['write']['median']:.0f} ms.")
    print(f"{given.stops - late} of {given.stops} stops were over within {limit:.2f} s; {lost} steps were lost.")
    figures = {"seed": given.seed, "stops": given.stops, "late": late, "lost_steps": lost, "limit_s": round(limit, 3)}
    write_results("stops", {**figures, "unit": "s", **rows, "from the signal": phases})
    return int(late > 0 or lost > 0)


def first_epoch(run: RunDir) -> float:
    """Train until the first epoch is over; returns how long its steps took, in seconds."""
    with ended(Ranks(run)) as ranks:
        ranks.until(lambda: CheckpointStore(run.checkpoints).steps(), "no checkpoint")
        ranks.signal(signal.SIGTERM, 0)
        ranks.wait()
    return step_seconds(run) * CheckpointStore(run.checkpoints).steps()[0]


def stop(run: RunDir, draw: random.Random, epoch_s: float) -> dict[str, Any]:
    """Resume the run and stop it; seconds from the signal to the end of the last step, through the save, to the exit
    of both ranks, and how many steps were lost."""
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
    committed = store.path(newest).stat().st_ctime  # of the rename
    # What the signal found done already took none of the stop's time.
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
    """How long this disk takes for the newest checkpoint's bytes in one file, committed as plainly as can be."""
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

"""From a requeue to the first step, against the least that it can take.

`python -m benchmarks.requeue [--rounds N]`. The run of the tests (the small network on mnist-5k, two ranks) is resumed
again and again, each time by fresh interpreters, as when Slurm has granted its nodes anew; the queue's waiting is no
part of it. The floor is measured in turns with it: two interpreters that import torch, meet, and read the bytes of
the checkpoint. The resume must take at most 1.2 times as long; the exit status says whether it does.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._measure import Ranks, ended, new_run, spread, start, write_results
from trainer.observe.metrics import read_lines
from trainer.rundir import RunDir

LIMIT = 1.2  # times the floor's median
FLOOR = """\
import json, sys, time
times = {"python": time.time()}
import torch
import torch.distributed as dist
times["torch"] = time.time()
dist.init_process_group("gloo")
times["meeting"] = time.time()
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        file.read()
times["read"] = time.time()
print(json.dumps(times), flush=True)
"""
# What rank 0 says of its first step, e.g. "first step after 2.31 s: python 0.02, torch 1.20".
SAID = re.compile(r"first step after [\d.]+ s: (.+)")


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; 1 when a resume takes too long."""
    parser = argparse.ArgumentParser(prog="benchmarks.requeue", description="From a requeue to the first step.")
    parser.add_argument("--rounds", type=int, default=15, help="resumes, and floors between them (default: 15)")
    rounds = parser.parse_args(words).rounds
    if rounds < 2:
        parser.error("--rounds must be at least 2")

    floors, resumes = measure(rounds)
    ratio = statistics.median(r["in all"] for r in resumes) / statistics.median(f["in all"] for f in floors)
    results = {"floor": by_phase(floors), "resume": by_phase(resumes)}
    for name, phases in results.items():
        print(f"{'median':>8}  {'10-90 %':>13}  {name} ({rounds} times)")
        for phase, s in phases.items():
            print(f"{s['median']:>6.2f} s  {s['p10']:>5.2f} - {s['p90']:.2f} s  {phase}")
    print(f"A resume takes {ratio:.2f} times the floor (at most {LIMIT} wanted).")
    write_results("requeue", {"rounds": rounds, "limit": LIMIT, "ratio": round(ratio, 3), "unit": "s", **results})
    return int(ratio > LIMIT)


def measure(rounds: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds by phase of each floor and each resume, in turns; the first of both, which fill caches, are dropped."""
    floors, resumes = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), "train.epochs=1000", "train.log_every=1")
        resume(run)  # the start, which leaves the first checkpoint
        for _ in range(rounds + 1):
            floors.append(floor(run))
            resumes.append(resume(run))
    return floors[1:], resumes[1:]


def resume(run: RunDir) -> dict[str, float]:
    """Resume the run for a step or a few, then stop it; seconds by phase up to the end of the first step."""
    before = len(read_lines(run.metrics))
    with ended(Ranks(run)) as ranks:
        ranks.until(lambda: len(read_lines(run.metrics)) > before, "no first step")
        ranks.signal(signal.SIGTERM, 0)
        ranks.wait()
    first = read_lines(run.metrics)[before]
    phases = {}
    if said := SAID.search(ranks.logs[0].read_text()):
        for phase in said[1].split(", "):
            name, _, seconds = phase.rpartition(" ")
            phases[name] = float(seconds)
    return {**phases, "in all": first["time"] - ranks.started}


def floor(run: RunDir) -> dict[str, float]:
    """What no resume can do without; seconds by phase, of the rank that is through last."""
    newest = max(run.checkpoints.glob("step_*"))
    command = [sys.executable, "-c", FLOOR, *map(str, newest.iterdir())]
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    logs = [run.logs / f"floor_{rank}.out" for rank in range(2)]
    started = time.time()
    ranks = [start(command, {**meeting, "RANK": str(rank)}, log) for rank, log in enumerate(logs)]
    for rank, log in zip(ranks, logs):
        if rank.wait():
            raise RuntimeError(f"the floor failed:\n{log.read_text()}")
    times = max((json.loads(log.read_text().splitlines()[-1]) for log in logs), key=lambda t: float(t["read"]))
    starts = [started, *times.values()]
    return {
        **{phase: end - begin for phase, begin, end in zip(times, starts, times.values())},
        "in all": times["read"] - started,
    }


def by_phase(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The spread of each phase over all rounds."""
    return {phase: spread([seconds[phase] for seconds in rounds]) for phase in rounds[0]}


if __name__ == "__main__":
    sys.exit(main())

"""The time from a requeue to the first step, by phase, compared with the least that each phase can take.

`python -m benchmarks.requeue [--rounds N]`. The run of the tests (the small network on mnist-5k, two ranks) is resumed
repeatedly, each time by fresh interpreters, as after Slurm has granted its nodes again; the wait in the queue is not
included. Resumes alternate with the floor: two interpreters that import torch, meet, read the bytes of the checkpoint,
and process a first batch in as few lines as possible. A resume up to its first step must take at most 1.2 times as long
as the floor beside it; if the median misses that by more than the noise, the exit status is 1. The ratio to a floor
without the batch, whose hand-written code is slower than Laststep's, gets a verdict too, but does not count.

A second table is for `train.compile`: the run's first start, which compiles, and a requeue, which reuses the compiled
code in the run folder. Each is measured once, as the first takes long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._measure import Check, Ranks, conclude, ended, new_run, spread, start
from laststep.data.catalog import MNIST_5K
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir

LIMIT = 1.2  # times the floor
FLOOR = """\
import json, os, sys, time
times = {"python": time.time()}
import torch
import torch.distributed as dist
times["import"] = time.time()
dist.init_process_group("gloo")
times["meet"] = time.time()
data, *names = sys.argv[1:]
for name in names:
    with open(name, "rb") as file:
        file.read()
times["restore"] = time.time()
from torch import nn
from torchvision.datasets import MNIST
digits = MNIST(data)
convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
layers = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*convolutions, *layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
nn.functional.cross_entropy(model(digits.data[:32, None] / 255), digits.targets[:32]).backward()
optimizer.step()
times["first batch"] = time.time()
print(json.dumps(times), flush=True)
os._exit(0)  # the exit is not measured, and a normal one might trip over DDP's threads
"""
# For each phase of the floor, the phases of a resume that do the same.
PHASES = {
    "python": ["python"],
    "import": ["importing torch"],
    "meet": ["meeting"],
    "restore": ["checking checkpoints", "reading checkpoint", "restore"],
    "first batch": ["data and model", "warm-up", "first step"],
}
# What rank 0 logs after its first step, e.g. "first step after 2.31 s: python 0.02, torch 1.20".
SAID = re.compile(r"first step after [\d.]+ s: (.+)")


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, write the results; returns 1 if a resume takes too long."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.requeue", description="The time from a requeue to the first step."
    )
    parser.add_argument("--rounds", type=int, default=5, help="resumes, alternating with the floor (default: 5)")
    rounds = parser.parse_args(words).rounds
    if rounds < 2:
        parser.error("--rounds must be at least 2")

    load = round(os.getloadavg()[0], 1)  # load average: how busy the machine was with other work
    floors, resumes = measure(rounds)
    pairs = [(resume["in all"], floor["in all"], floor["first batch"]) for resume, floor in zip(resumes, floors)]
    floor, resume = by_phase(floors), by_phase(resumes)
    print(f"{'resume':>8}  {'10-90 %':>13}  {'floor':>6}  {'10-90 %':>13}  phase (medians of {rounds})")
    for phase, s in resume.items():
        f = floor[phase]
        print(
            f"{s['median']:>6.2f} s  {s['p10']:>5.2f} - {s['p90']:.2f} s  "
            f"{f['median']:>4.2f} s  {f['p10']:>5.2f} - {f['p90']:.2f} s  {phase}"
        )
    compiled = compiles()
    print(f"{'total':>8}  {'compile':>8}  with train.compile, measured once each")
    for name, taken in compiled.items():
        print(f"{taken['in all']:>6.1f} s  {taken['warm-up']:>6.1f} s  {name}")
    results = {"load_before": load, "rounds": rounds, "unit": "s"}
    checks = [
        Check("resume / floor", LIMIT, [took / floor for took, floor, _ in pairs]),
        Check(
            "resume / floor without its batch", LIMIT, [took / (f - batch) for took, f, batch in pairs], counts=False
        ),
    ]
    return conclude("requeue", {**results, "floor": floor, "resume": resume, "compile": compiled}, checks)


def measure(rounds: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds by phase of each floor and each resume, which alternate. The first of each, which fills caches, is
    dropped."""
    floors, resumes = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), "train.epochs=1000", "train.log_every=1")
        resume(run)  # the first start, which writes the first checkpoint
        for _ in range(rounds + 1):
            floors.append(floor(run))
            said = resume(run)
            phases = {phase: sum(said[part] for part in parts) for phase, parts in PHASES.items()}
            resumes.append({**phases, "in all": said["in all"]})
    return floors[1:], resumes[1:]


def compiles() -> dict[str, dict[str, float]]:
    """Seconds of a compiled run's first start and of its requeue; torch compiles in the warm-up phase."""
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder), "train.epochs=1000", "train.log_every=1", "train.compile=true")
        return {name: {part: round(s, 2) for part, s in resume(run).items()} for name in ("first start", "requeue")}


def resume(run: RunDir) -> dict[str, float]:
    """Resume the run for at least one step, then stop it; returns seconds by phase up to the end of the first step."""
    before = len(read_lines(run.metrics))
    with ended(Ranks(run)) as ranks:
        ranks.until(lambda: len(read_lines(run.metrics)) > before, "no first step")
        ranks.signal(signal.SIGTERM, 0)
        ranks.wait()
    first = read_lines(run.metrics)[before]
    phases: dict[str, float] = {}
    if said := SAID.search(ranks.logs[0].read_text()):
        for phase in said[1].split(", "):
            name, _, seconds = phase.rpartition(" ")
            phases[name] = float(seconds)
    return {**phases, "in all": first["time"] - ranks.started}


def floor(run: RunDir) -> dict[str, float]:
    """Do only what no resume can do without; returns seconds by phase, of the rank that finished reading last."""
    newest = max(run.checkpoints.glob("step_*"))
    command = [sys.executable, "-c", FLOOR, str(MNIST_5K), *map(str, newest.iterdir())]
    started = time.time()
    times = max(of_both(run, "floor", command), key=lambda t: t["restore"])
    starts = [started, *times.values()]
    return {
        **{phase: end - begin for phase, begin, end in zip(times, starts, times.values())},
        "in all": times["first batch"] - started,
    }


def of_both(run: RunDir, name: str, command: list[str]) -> list[dict[str, float]]:
    """What two ranks of a bare program print last."""
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    logs = [run.logs / f"{name}_{rank}.out" for rank in range(2)]
    ranks = [start(command, {**meeting, "RANK": str(rank)}, log) for rank, log in enumerate(logs)]
    for rank, log in zip(ranks, logs):
        if rank.wait():
            raise RuntimeError(f"{name} failed:\n{log.read_text()}")
    return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


def by_phase(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The spread of each phase over all rounds."""
    return {phase: spread([seconds[phase] for seconds in rounds]) for phase in rounds[0]}


if __name__ == "__main__":
    sys.exit(main())

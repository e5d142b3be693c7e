"""How long `launch.py status` takes for a thousand runs.

`python -m benchmarks.status [--runs N]`. Each run has a submission, three attempts and a metrics.jsonl of 2,000 steps.
A fake squeue, which answers at once, counts its calls. The table must be complete within 2 s, with a single call of
squeue; if the median misses that by more than the noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._measure import PROJECT, Check, conclude, spread
from laststep.rundir import RunDir
from laststep.runs.queue import SEPARATOR

LIMIT_S = 2.0
ROUNDS = 5
SQUEUE = """#!/bin/sh
echo call >> "$(dirname "$0")/calls"
cat "$(dirname "$0")/jobs"
"""


def main(words: list[str] | None = None) -> int:
    """Measure, print, write the results; returns 1 if status takes too long or calls squeue more than once."""
    parser = argparse.ArgumentParser(prog="benchmarks.status", description="How long status takes for many runs.")
    parser.add_argument("--runs", type=int, default=1000, help="run folders (default: 1000)")
    runs = parser.parse_args(words).runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "squeue").write_text(SQUEUE)
        (folder / "squeue").chmod(0o755)
        rest = ("RUNNING", "N/A", "2000-01-01T00:00:00", str(os.getuid()), "name", "(null)", "None")
        jobs = [SEPARATOR.join((str(number), *rest)) for number in range(1, runs + 1)]
        (folder / "jobs").write_text("\n".join(jobs) + "\n")
        for number in range(1, runs + 1):
            make_run(RunDir(folder / "runs" / f"run-{number:04}"), number)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        command = [sys.executable, "launch.py", "status", f"launch.root={folder / 'runs'}"]
        taken = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            shown = subprocess.run(command, cwd=PROJECT, env=environment, check=True, capture_output=True, text=True)
            taken.append(time.perf_counter() - began)
        calls = len((folder / "calls").read_text().splitlines()) / ROUNDS
    *_, totals = lines = shown.stdout.splitlines()
    if len(lines) != runs + 2 or totals != f"{runs:,} running":
        raise RuntimeError(f"expected a table of {runs} running runs, got:\n{shown.stdout[-2000:]}")
    seconds = spread(taken)
    checks = [Check(f"status of {runs} runs", LIMIT_S, taken, "s"), Check("calls of squeue", 1, [calls])]
    return conclude("status", {"runs": runs, "squeue_calls": calls, "unit": "s", "status": seconds}, checks)


def make_run(run: RunDir, number: int) -> None:
    """Create the folder of a run that has been requeued twice and is running."""
    run.logs.mkdir(parents=True)
    now = time.time()
    run.config.write_text("{}\n")
    run.plan.write_text(json.dumps({"total_steps": 5000, "batch_size": 64}) + "\n")
    run.submissions.write_text(json.dumps({"job_id": str(number), "time": now - 3600}) + "\n")
    attempts = [
        {
            **{"attempt": n, "job_id": str(number), "restart": n, "hosts": ["n1", "n2"], "world_size": 8},
            **{"start": now - 3600 + 1200 * n, "end": now - 2400 + 1200 * n, "start_step": 700 * n},
            **{"end_step": 700 * n + 700, "reason": "preempted", "lost_steps": 0, "step_s": 1.5, "requeue": True},
        }
        for n in range(2)
    ]
    run.attempts.write_text("".join(json.dumps(record) + "\n" for record in attempts))
    under_way = {**attempts[1], "attempt": 2, "restart": 2, "start": now - 1200, "end": None, "reason": None}
    run.attempt_now.write_text(json.dumps(under_way | {"start_step": 1400, "end_step": 1400}) + "\n")
    with run.metrics.open("w") as file:
        for step in range(1, 2001):
            line = {"step": step, "epoch": 1, "loss": 1 / step, "lr": 0.1, "samples_per_s": 42.7, "time": now}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""The first start of a compiled run, and that of its next attempt, which reuses the compiled code in the run folder."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._gpu.contenders import GPU, WORKLOAD, Workload
from benchmarks._gpu.throughput import RESNET, words
from benchmarks._measure import PROJECT

LOAD = RESNET if GPU else Workload("convnet", 64, 32, lead=1, steps=1)
# What rank 0 logs after its first step.
SAID = re.compile(r"first step after ([\d.]+) s: (.+)")
DEADLINE_S = 420.0


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure both starts. The first cannot reuse code that other runs have compiled."""
    results = {}
    for name in ("first", "again"):
        results[name] = start(folder)
        print(f"{results[name]['in all']:>7.1f} s  {name}: {LOAD.model}, {results[name]['phases']}", flush=True)
    return {"model": LOAD.model, "starts": results}


def start(folder: Path) -> dict[str, Any]:
    """Start or resume the run up to its first step, then stop it; returns the seconds in total and by phase."""
    command = [sys.executable, "-um", "laststep", "--name=starts", *words(LOAD, 1000, folder)]
    command += ["train.compile=true", "train.log_every=1"]
    env = {
        name: value for name, value in os.environ.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    log = folder / "starts.log"
    began = time.monotonic()
    with log.open("wb") as output:
        run = subprocess.Popen(
            command, cwd=PROJECT, env={**env, WORKLOAD: json.dumps(LOAD)}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while not (said := SAID.search(log.read_text())):
            if run.poll() is not None or time.monotonic() > began + DEADLINE_S:
                raise RuntimeError(f"no first step:\n{log.read_text()}")
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        run.wait(DEADLINE_S)
    finally:
        run.kill()
    return {"in all": float(said[1]), "phases": said[2]}

"""The cost of a gigabyte-sized save for the training loop: its stall, and the extra time of steps during the write."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._gpu.contenders import DEVICE, GPU
from benchmarks._gpu.throughput import finish
from benchmarks.save import file_system
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter

TENSOR = 64 << 20  # bytes per tensor
SAVES, ENOUGH_S = 4, 60.0  # saves of each size; fewer, but at least two, if they take longer than ENOUGH_S
QUIET_STEPS = 20


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure every size that fits on the disk."""
    results: dict[str, Any] = {"file_system": file_system(folder)}
    print(f"{'stall':>9} {'write':>8} {'step beside':>12} {'lost':>9}   on {results['file_system']}")
    for gigabytes in given.gigabytes:
        free = shutil.disk_usage(folder).free / 1e9
        if free < 2.2 * gigabytes:  # a checkpoint is written before the previous one is deleted
            results[f"{gigabytes:g} GB"] = skipped = f"left out: the disk has {free:.0f} GB free"
            print(skipped)
            continue
        results[f"{gigabytes:g} GB"] = of_size(gigabytes, folder / f"{gigabytes:g}")
    return results


def of_size(gigabytes: float, folder: Path) -> dict[str, Any]:
    """Measure saves of `gigabytes` of parameters: the first, which allocates the buffer, and later ones."""
    tensors = max(1, round(gigabytes * 1e9 / TENSOR))
    state = {str(number): torch.full((TENSOR // 4,), float(number), device=DEVICE) for number in range(tensors)}
    work = Work()
    writer = CheckpointWriter(CheckpointStore(folder), dist.HashStore(), 0, 1, torch.device(DEVICE))
    trials: list[dict[str, float]] = []
    began = time.monotonic()
    while len(trials) < 2 or (len(trials) < SAVES and time.monotonic() < began + ENOUGH_S):
        trials.append(save(writer, len(trials) + 1, state, work))
    writer.close()
    shutil.rmtree(folder)
    usual = {name: statistics.median(trial[name] for trial in trials[1:]) for name in trials[0]}
    rows = {"the first": trials[0], "those after it": usual, "torch.save and fsync": synchronous(state, folder)}
    for name, row in rows.items():
        print(
            f"{row['stall_s']:>7.3f} s {row['write_s']:>6.1f} s {row['slow_down']:>10.2f} x {row['lost_s']:>7.2f} s   "
            f"{gigabytes:g} GB: {name}",
            flush=True,
        )
    return {"saves": len(trials), **{name: {k: round(v, 4) for k, v in row.items()} for name, row in rows.items()}}


class Work:
    """Steps to do during a save: matrix products."""

    def __init__(self) -> None:
        edge, self.products = (8192, 20) if GPU else (512, 4)
        self.matrix = torch.eye(edge, dtype=torch.bfloat16, device=DEVICE)

    def step(self) -> float:
        """Do one step; returns its duration in seconds."""
        began = time.perf_counter()
        for _ in range(self.products):
            self.matrix @ self.matrix
        finish()
        return time.perf_counter() - began


def save(writer: CheckpointWriter, number: int, state: Any, work: Work) -> dict[str, float]:
    """One save, from the call to the commit."""
    quiet = statistics.median(work.step() for _ in range(QUIET_STEPS))
    began = time.perf_counter()
    writer.start(CheckpointInfo(number, 1, 1, {}), state, lambda: None, 1, 0)
    stall = time.perf_counter() - began
    beside = [work.step()]
    while not writer.wait(0):
        beside.append(work.step())
    if writer.error:
        raise writer.error
    lost = stall + sum(seconds - quiet for seconds in beside)
    write, slow_down = time.perf_counter() - began, statistics.fmean(beside) / quiet
    return {"stall_s": stall, "write_s": write, "slow_down": slow_down, "lost_s": lost}


def synchronous(state: Any, folder: Path) -> dict[str, float]:
    """The usual way: the loop stands still until everything is on the disk."""
    folder.mkdir()
    began = time.perf_counter()
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return {"stall_s": seconds, "write_s": seconds, "slow_down": 1.0, "lost_s": seconds}

"""The cost of a periodic save: CheckpointWriter compared with torch.save and torch.distributed.checkpoint.

`python -m benchmarks.save [--rounds N] [--folder F]`. Two gloo ranks train a small network. The state that they save is
that of a ResNet-50 with AdamW and a moving average, about 400 MB, the same on both ranks. Each round tries every way
of saving, in rotating order, on the same file system. The first round, which fills reusable buffers, is dropped.

It measures the stall (how long the training loop stood still, on the slower rank) and the extra time of the steps that
ran while the save was written. Compared in each round, the stall of CheckpointWriter must be no longer than the
shortest of torch.distributed.checkpoint, and at most 1.5 times a bare copy of the same bytes in memory; if a median
misses that by more than the noise, the exit status is 1.

The goal of a tenth of a synchronous torch.save with fsync gets a verdict too, but does not count: a machine with a fast
disk and slow memory misses it even with the bare copy, which is listed for that reason.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

from benchmarks._measure import Check, conclude
from laststep.checkpoint.files import stripe_count
from laststep.checkpoint.pack import Packed
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter

RANKS = 2
QUIET_STEPS = 8  # steps before each save, while nothing is written
GOAL = 0.1  # highest desirable ratio to the stall of the synchronous save
LIMIT = 1.5  # highest acceptable ratio to a bare copy
OURS, SYNCHRONOUS, UNSYNCED, ASYNC_SAVE = "CheckpointWriter", "torch.save + fsync", "torch.save", "async_save"
COPY = "a bare copy in memory"

# Starts saving the state to a folder, returns as soon as training may continue, and returns a function that says
# whether the save has ended.
Save = Callable[[Path, int], Callable[[], bool]]


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if the stall of CheckpointWriter is over a limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.save", description="The cost of a periodic save.")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind (default: 5)")
    parser.add_argument(
        "--folder", type=Path, help="a folder on the file system to measure (default: the temporary folder)"
    )
    options = parser.parse_args(words)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")

    load = round(os.getloadavg()[0], 1)  # how busy the machine was with other work
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        spawn(_rank, (folder, options.rounds), nprocs=RANKS)
        measured = json.loads((folder / "measured.json").read_text())
        where = {"file_system": file_system(folder), "load_before": load}
    trials = measured.pop("trials")
    results = {name: summary(trials[name], trials[SYNCHRONOUS]) for name in trials}
    rival = min((name for name in results if name.startswith(ASYNC_SAVE)), key=lambda name: results[name]["stall_ms"])

    print(f"{measured['bytes'] / 1e6:.0f} MB, {RANKS} ranks, {options.rounds} saves of each kind, medians")
    print(f"{'stall':>8}  {'10-90 %':>15}  {'ratio':>6}  {'write':>6}  {'step beside':>11}  {'lost':>8}")
    for name, r in results.items():
        print(
            f"{r['stall_ms']:>5.0f} ms  {r['stall_p10_ms']:>5.0f} - {r['stall_p90_ms']:>4.0f} ms  {r['ratio']:>6.3f}  "
            f"{r['write_s']:>4.1f} s  {r['slow_down']:>9.2f} x  {r['lost_ms']:>5.0f} ms  {name}"
        )
    print(
        "bytes per rank:", ", ".join(f"{count / 1e6:.1f} MB on {n}" for n, count in measured["bytes_per_rank"].items())
    )
    stalls = {name: [trial["stall_s"] for trial in each] for name, each in trials.items()}
    ratios = {name: [ours / theirs for ours, theirs in zip(stalls[OURS], each)] for name, each in stalls.items()}
    tenth = [copy / theirs for copy, theirs in zip(stalls[COPY], stalls[SYNCHRONOUS])]
    checks = [
        Check(f"stall / {rival}", 1.0, ratios[rival]),
        Check(f"stall / {COPY} of the same bytes", LIMIT, ratios[COPY]),
        Check(f"stall / {SYNCHRONOUS}", GOAL, ratios[SYNCHRONOUS], counts=False),
        Check(f"{COPY} / {SYNCHRONOUS}", GOAL, tenth, counts=False),
    ]
    settings = {"ranks": RANKS, "rounds": options.rounds}
    return conclude("save", {**where, **settings, **measured, "results": results}, checks)


def summary(trials: list[dict[str, float]], synchronous: list[dict[str, float]]) -> dict[str, float]:
    """Medians and spread of one way of saving, and the ratio of its stall to that of the synchronous save."""
    stalls = [1000 * trial["stall_s"] for trial in trials]
    tenths = statistics.quantiles(stalls, n=10, method="inclusive")
    median = statistics.median(stalls)
    return {
        "stall_ms": round(median, 1),
        "stall_p10_ms": round(tenths[0], 1),
        "stall_p90_ms": round(tenths[-1], 1),
        "ratio": round(median / statistics.median(1000 * trial["stall_s"] for trial in synchronous), 4),
        "write_s": round(statistics.median(trial["write_s"] for trial in trials), 3),
        # The ratio of a step's time during the write to that of a quiet step, and the total time that the loop lost.
        "slow_down": round(statistics.median(trial["slow_down"] for trial in trials), 3),
        "lost_ms": round(statistics.median(1000 * trial["lost_s"] for trial in trials), 1),
    }


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(place), kind) for _, place, kind, *_ in mounts if folder.resolve().is_relative_to(place))[1]


def _rank(rank: int, folder: Path, rounds: int) -> None:
    """The body of a rank's process: try every way of saving in each round."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # async_save's processes print a lot; exceptions reach main anyway
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    keys = dist.FileStore(str(folder / "keys"), RANKS)
    dist.init_process_group("gloo", store=keys, rank=rank, world_size=RANKS)
    state = resnet_state()
    loop = Loop()
    ways = ways_to_save(state, keys, rank)
    trials: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in order:
            trials[name].append(loop.trial(ways[name], folder / f"{number} {name}", number))
            if rank == 0:
                for path in folder.glob("* *"):
                    shutil.rmtree(path)
                os.sync()  # data not yet written by one way must not slow down the next
    if rank == 0:
        measured = {
            "bytes": Packed(state).bytes,
            "tensors": sum(1 for _ in torch.utils._pytree.tree_leaves(state) if isinstance(_, Tensor)),
            "quiet_step_ms": round(1000 * statistics.median(loop.quiet), 1),
            "bytes_per_rank": bytes_per_rank(state, folder),
            "trials": {name: taken[1:] for name, taken in trials.items()},
        }
        (folder / "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


class Loop:
    """A training loop for a small network, with saves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        self.model = DistributedDataParallel(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 1000)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(16, 3, 32, 32)
        self.quiet: list[float] = []  # seconds of the steps during which nothing was written

    def step(self) -> float:
        """Do one step; returns its duration in seconds."""
        start = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def trial(self, save: Save, folder: Path, number: int) -> dict[str, float]:
        """One save: its stall and the extra time of the steps that ran during the write, in seconds."""
        dist.barrier()
        quiet = [self.step() for _ in range(QUIET_STEPS)]
        self.quiet += quiet
        dist.barrier()
        start = time.perf_counter()
        ended = save(folder, number)
        stall = largest(time.perf_counter() - start)
        beside = []
        while largest(float(not ended())):
            beside.append(self.step())
        step = statistics.median(quiet)
        return {
            "stall_s": stall,
            "write_s": time.perf_counter() - start,
            "slow_down": statistics.fmean(beside) / step if beside else 1.0,
            "lost_s": stall + sum(taken - step for taken in beside),
        }


def largest(value: float) -> float:
    """The largest of the values on all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def resnet_state() -> dict[str, Any]:
    """The state of a ResNet-50, the same on every rank: weights, their average, AdamW's moments."""
    torch.manual_seed(0)
    model = models.resnet50()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    average = copy.deepcopy(model.state_dict())
    return {"model": model.state_dict(), "average": average, "optimizer": optimizer.state_dict()}


def ways_to_save(state: dict[str, Any], keys: dist.Store, rank: int) -> dict[str, Save]:
    """The ways of saving to compare, by name."""
    group = dist.new_group(backend="gloo")  # async_save communicates from another thread
    writers: list[CheckpointWriter] = []

    def ours(folder: Path, number: int) -> Callable[[], bool]:
        if not writers:
            writers.append(
                CheckpointWriter(CheckpointStore(folder.parent / "ours"), keys, rank, RANKS, torch.device("cpu"))
            )
        writer = writers[0]
        writer.start(CheckpointInfo(number + 1, 1, 1, {}), state, lambda: None, 1, 0)

        def ended() -> bool:
            if writer.error:
                raise writer.error
            return writer.wait(0)

        return ended

    def synchronous(fsync: bool) -> Save:
        def save(folder: Path, number: int) -> Callable[[], bool]:
            if rank == 0:
                folder.mkdir()
                with (folder / "state.pt").open("wb") as file:
                    torch.save(state, file)
                    if fsync:
                        file.flush()
                        os.fsync(file.fileno())
            dist.barrier()
            return lambda: True

        return save

    stripe = torch.ones(Packed(state).bytes // RANKS, dtype=torch.uint8)
    buffer = torch.zeros_like(stripe)

    def bare_copy(folder: Path, number: int) -> Callable[[], bool]:
        buffer.copy_(stripe)
        return lambda: True

    def async_save(kind: AsyncCheckpointerType, stager: DefaultStager | None) -> Save:
        def save(folder: Path, number: int) -> Callable[[], bool]:
            answer = dcp.async_save(
                state, checkpoint_id=folder, process_group=group, async_checkpointer_type=kind, async_stager=stager
            )

            def ended() -> bool:
                if answer.done():
                    answer.result()
                return answer.done()

            return ended

        return save

    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    kept = DefaultStager(StagingOptions(False, False, False, False))
    shared = DefaultStager(StagingOptions(False, True, False, False))
    return {
        OURS: ours,
        COPY: bare_copy,
        SYNCHRONOUS: synchronous(fsync=True),
        UNSYNCED: synchronous(fsync=False),
        f"{ASYNC_SAVE}, as it comes": async_save(thread, None),
        f"{ASYNC_SAVE}, kept staging": async_save(thread, kept),
        f"{ASYNC_SAVE}, process": async_save(process, None),
        f"{ASYNC_SAVE}, process, kept shared staging": async_save(process, shared),
    }


def bytes_per_rank(state: Any, folder: Path) -> dict[int, int]:
    """The most bytes that a rank writes, by the number of ranks. Here the ranks are threads of one process."""
    most = {}
    for size in (1, 2, 4):
        store, keys = CheckpointStore(folder / f"of {size}"), dist.HashStore()
        writers = [CheckpointWriter(store, keys, rank, size, torch.device("cpu")) for rank in range(size)]
        for writer in writers:
            writer.start(CheckpointInfo(1, 1, 1, {}), state, lambda: None, 1, 0)
        for writer in writers:
            if not writer.wait(600) or writer.error:
                raise writer.error or TimeoutError("a save took ten minutes")
        manifest = store.manifest(1)
        sizes = [manifest.files[name]["bytes"] for name in manifest.shards]
        each = len(sizes) // stripe_count(sum(sizes), size)  # files of a rank
        most[size] = max(sum(sizes[first : first + each]) for first in range(0, len(sizes), each))
        shutil.rmtree(store.folder)
    return most


if __name__ == "__main__":
    sys.exit(main())

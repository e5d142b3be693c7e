"""What copies in another node's memory cost per step.

`python -m benchmarks.replicas [--megabytes M] [--ranks N] [--step-ms T] [--steps S]`. Gloo ranks on two pretended nodes
hold a shard of M megabytes each. A step computes for T milliseconds and ends with a small collective. It is timed
without copies, with copies of every 10th step, and with copies of every step; see checkpoint.replica_every_steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks._measure import DEADLINE_S, write_results
from laststep.checkpoint.manager import Position
from laststep.checkpoint.memory import HostMemory
from laststep.checkpoint.writer import CheckpointInfo
from laststep.loops.snapshot import Copies
from laststep.ranks.launchers import free_port
from laststep.ranks.meeting import SealedStore
from laststep.ranks.replicas import ReplicaLink
from laststep.ranks.seal import Seal
from laststep.ranks.world import ShardPlace, World

EVERY = (None, 10, 1)  # steps between copies
ROW = 1024  # floats


def main(words: list[str] | None = None) -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.replicas", description="What copies on other nodes cost.")
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of a rank's shard (default: 200)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, an even number (default: 2)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="computation in a step (default: 100)")
    parser.add_argument("--steps", type=int, default=50, help="steps of each kind (default: 50)")
    given = parser.parse_args(words)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    port = free_port()
    ranks = [context.Process(target=_rank, args=(rank, port, given, there)) for rank in range(given.ranks)]
    for process in ranks:
        process.start()
    try:
        if not here.poll(DEADLINE_S + 4 * given.steps * (given.step_ms + given.megabytes) / 1000):
            raise TimeoutError("the ranks did not end")
        taken: dict[str, dict[str, float]] = here.recv()
        for process in ranks:
            process.join(DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
    print(f"{given.ranks} ranks, {given.megabytes:g} MB each, {given.step_ms:g} ms of computation per step, means")
    for name, figures in taken.items():
        print(f"{name:>20}: {figures['step_ms']:.1f} ms per step, of which copying stops it for", end=" ")
        print(f"{figures['copy_ms']:.1f} ms and waiting for the keeper {figures['wait_ms']:.1f} ms")
    write_results(f"replicas_{given.ranks}", {**vars(given), **taken})
    return 0


def _rank(rank: int, port: int, given: argparse.Namespace, answer: Connection) -> None:
    """The body of a rank's process."""
    torch.set_num_threads(1)
    size, each = given.ranks, given.ranks // 2
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=DEADLINE_S))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    local = torch.zeros(int(given.megabytes * 1e6 / 4) // ROW, ROW)
    state = {"weights": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    hosts = tuple(f"node {one // each}" for one in range(size))
    world = World(rank, size, rank % each, each, rank // each, 2, hosts, "0", 0, "0-0", "env", False)
    taken = {}
    for every in EVERY:
        name = "no copies" if every is None else f"every {every} steps" if every > 1 else "every step"
        sealed = SealedStore(store, Seal(b"the same on every rank"), f"{name}/")
        taken[name] = _steps(world, sealed, state, every, given)
    if rank == 0:
        answer.send(taken)
    dist.barrier()
    dist.destroy_process_group()


def _steps(
    world: World, store: SealedStore, state: dict[str, Any], every: int | None, given: argparse.Namespace
) -> dict[str, float]:
    """Do the steps; returns the mean milliseconds of one, and of what copies add to it."""
    copies = None
    if every is not None:
        seal = Seal(b"the same on every rank")
        link = ReplicaLink(world, store, seal, lambda count: HostMemory(count).tensor.numpy().data)
        place = ShardPlace(world.rank, world.size, 0, 1)
        copies = Copies(link, place, torch.device("cpu"), every, DEADLINE_S)
    number, warm_up, flag, times = torch.ones(200, 200), 2 * (every or 1), torch.zeros(1), []
    for step in range(1, given.steps + warm_up + 1):
        if step == warm_up + 1 and copies is not None:
            copies.copied_s = copies.waited_s = 0.0
        began = time.perf_counter()
        while time.perf_counter() - began < given.step_ms / 1000:
            number = number @ number / 200
        dist.all_reduce(flag)
        if copies is not None:
            if copies.is_due(step):
                copies.take(Position(step=step), CheckpointInfo(step, 1, 0, {}), state, [])
            if copies.is_due(step + 1):
                copies.complete()
        times.append(time.perf_counter() - began)
    dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE_S))
    figures = {"step_ms": statistics.mean(times[warm_up:]), "copy_ms": 0.0, "wait_ms": 0.0}
    if copies is not None:
        figures |= {"copy_ms": copies.copied_s / given.steps, "wait_ms": copies.waited_s / given.steps}
        copies.close()
    return {name: round(1000 * seconds, 2) for name, seconds in figures.items()}


if __name__ == "__main__":
    sys.exit(main())

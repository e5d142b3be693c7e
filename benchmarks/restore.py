"""What it costs to restore a checkpoint: bytes read and memory of each rank, and the time, compared with only reading.

`python -m benchmarks.restore [--rounds N] [--gigabytes N] [--folder F]`. A state of 1 GB, from the page cache and from
the disk (the files are dropped from the page cache where the system allows it). Each trial runs in separate processes,
with fresh memory.

First 1, 2, 4 and 8 ranks, connected by gloo, resume from eight shards as an attempt does
(`laststep.checkpoint.restore`) into tensors that they hold already. By rank: the bytes that it has read (rchar of
/proc/self/io, and read_bytes, those that the disk served), and its peak memory (VmHWM) beyond what it held before.
Together the ranks may read the checkpoint's bytes only once, and the memory of each is at most its share, two pieces,
and EXTRA_MB.

Then one process reads one shard and four, by ways that take turns:

    read          one thread reads the bytes into one buffer: the lower bound for `load`
    load          what `export` and `evaluate` do: load all tensors
    torch.load    load the same state from a file written by torch.save, without verification
    hash          SHA-256 over the same number of bytes, one thread per shard: the lower bound for `verify`
    verify        what `verify`, `export` and `evaluate` do first: read everything and compare it with the hashes

With four shards in the page cache `load` must take at most 1.2 times as long as the `read` beside it. The exit status
is 1 if a limit is missed, the last one by more than the noise.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._measure import Check, conclude, spread
from laststep.checkpoint.files import READ_BYTES
from laststep.checkpoint.pack import load, map_tensors
from laststep.checkpoint.restore import PIECE_BYTES, NewestCheckpoint
from laststep.checkpoint.store import STRUCTURE, CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.ranks.group import register_rank
from laststep.ranks.world import World

LIMIT = 1.2  # times `read`
TENSORS = 250
STATE = "state.pt"
# (number of shards, whether they are in the page cache)
RANKS = (1, 2, 4, 8)
EXTRA_MB = 20.0  # of a rank's connections and threads
DEADLINE_S = 600.0
PLACES = {"four shards": (4, True), "one shard": (1, True), "four shards, from the disk": (4, False)}


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if `load` takes too long."""
    parser = argparse.ArgumentParser(prog="benchmarks.restore", description="What it costs to restore a checkpoint.")
    parser.add_argument("--rounds", type=int, default=2, help="trials of each kind (default: 2)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default: 1)")
    parser.add_argument(
        "--folder", type=Path, help="a folder on the file system to measure (default: the temporary folder)"
    )
    given = parser.parse_args(words)
    if given.rounds < 2:
        parser.error("--rounds must be at least 2")

    load_before = round(os.getloadavg()[0], 1)  # how busy the machine was with other work
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        stores = {shards: CheckpointStore(Path(name) / str(shards)) for shards in (1, 4, 8)}
        for shards, store in stores.items():
            in_process(write, store, given.gigabytes, shards)
        together = {size: restored_together(stores[8], size) for size in RANKS}
        taken = measure(stores, given.rounds)
        size = stores[4].manifest(1).bytes
    results = {place: {way: spread(seconds) for way, seconds in ways.items()} for place, ways in taken.items()}
    ratios = [ours / read for ours, read in zip(*(taken["four shards"][way] for way in ("load", "read")))]
    missed = print_ranks(together, size)
    for place, ways in results.items():
        print(f"{'median':>8}  {'10-90 %':>13}  {size / 1e9:.2f} GB, {place}")
        for way, s in ways.items():
            print(f"{s['median']:>6.2f} s  {s['p10']:>5.2f} - {s['p90']:.2f} s  {way}")
    settings = {"load_before": load_before, "bytes": size, "rounds": given.rounds, "unit": "s"}
    checks = [
        Check("ranks that read or hold more than their share", 0, [missed]),
        Check("load / read, four shards in the page cache", LIMIT, ratios),
    ]
    return conclude("restore", {**settings, "together": together, "results": results}, checks)


def print_ranks(together: dict[int, list[dict[str, float]]], size: int) -> int:
    """Print what the ranks have read and held; returns how often a limit was missed."""
    missed = 0
    print(
        f"{'ranks':>5}  {'read, all':>9}  {'read, a rank':>15}  {'disk, all':>9}  {'memory, a rank':>14}  {'time':>6}"
    )
    for count, ranks in together.items():
        read, disk, memory, seconds = (
            [each[what] for each in ranks] for what in ("read_mb", "disk_mb", "memory_mb", "seconds")
        )
        limit = size / 1e6 / count + 2 * PIECE_BYTES / 1e6 + EXTRA_MB
        fails = sum(read) > 1.01 * size / 1e6 + count or max(memory) > limit
        missed += fails
        each = f"{min(read):.1f} - {max(read):.1f}"
        print(
            f"{count:>5}  {sum(read):>6.1f} MB  {each:>12} MB  {sum(disk):>6.1f} MB  {max(memory):>11.1f} MB  "
            f"{max(seconds):>4.2f} s{' MISSED' if fails else ''}"
        )
    return missed


def restored_together(store: CheckpointStore, size: int) -> list[dict[str, float]]:
    """What each of `size` ranks reads, holds and takes, when they restore together from the disk."""
    cache(store.folder, False)
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(size)]
    with tempfile.TemporaryDirectory() as name:
        meeting = Path(name) / "meeting" / "restore.json"
        ranks = [
            fork.Process(target=_rank, args=(rank, size, store, meeting, pipe)) for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            if not all(pipe.poll(DEADLINE_S) for pipe, _ in pipes):
                raise TimeoutError(f"{size} ranks did not restore within {DEADLINE_S:.0f} s")
            return [pipe.recv() for pipe, _ in pipes]
        finally:
            for process in ranks:
                process.join(30)
                process.kill()


def _rank(rank: int, size: int, store: CheckpointStore, meeting: Path, answer: Connection) -> None:
    """The body of a rank's process."""
    torch.set_num_threads(1)
    world = World(rank, size, rank, size, 0, 1, ("localhost",) * size, "restore", 0, "restore-0", "benchmark", False)
    group = register_rank(world, torch.device("cpu"), "gloo", meeting, DEADLINE_S)
    group.connect(DEADLINE_S)
    stand_ins = torch.load(store.path(1) / STRUCTURE, weights_only=True)
    live = map_tensors(stand_ins, lambda stand_in: torch.zeros(stand_in.size(), dtype=stand_in.dtype).fill_(1))
    group.barrier(DEADLINE_S)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (man 5 proc)
    before, held, began = io_so_far(), status_of("VmRSS"), time.perf_counter()
    checkpoint = NewestCheckpoint(store, group, store.candidates(print), print, lambda count: None).finish()
    assert checkpoint is not None
    state = checkpoint.load(live, lambda: None)
    seconds, after = time.perf_counter() - began, io_so_far()
    for name, tensor in state["model"].items():
        assert tensor.data_ptr() == live["model"][name].data_ptr(), "not loaded in place"
    answer.send(
        {
            "read_mb": round((after["rchar"] - before["rchar"]) / 1e6, 2),
            "disk_mb": round((after["read_bytes"] - before["read_bytes"]) / 1e6, 2),
            "memory_mb": round((status_of("VmHWM") - held) / 1e6, 2),
            "seconds": round(seconds, 3),
        }
    )
    group.close()


def io_so_far() -> dict[str, int]:
    """What this process has read so far, in bytes (man 5 proc)."""
    return {name: int(count) for name, count in re.findall(r"(\w+): (\d+)", Path("/proc/self/io").read_text())}


def status_of(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"no {name} in /proc/self/status"
    return int(found[1]) * 1024


def write(store: CheckpointStore, gigabytes: float, shards: int) -> None:
    """Write one checkpoint, with one rank per shard, and the same state with torch.save."""
    keys = dist.HashStore()
    model = {f"tensor {number}": torch.rand(int(gigabytes * 1e9 / 4 / TENSORS)) for number in range(TENSORS)}
    state = {"position": {}, "model": model}
    writers = [CheckpointWriter(store, keys, rank, shards, torch.device("cpu")) for rank in range(shards)]
    for writer in writers:
        writer.start(CheckpointInfo(1, 1, 1, {}), state, lambda: None, 1, 0)
    for writer in writers:
        if not writer.wait(600) or writer.error:
            raise writer.error or TimeoutError("a save took ten minutes")
        writer.close()
    with (store.folder / STATE).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # otherwise it could not be dropped from the page cache


def measure(stores: dict[int, CheckpointStore], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by place and way of reading, which take turns. The first round, which fills caches, is dropped."""
    ways = {"read": read, "load": load_all, "torch.load": torch_load, "hash": hash_alone, "verify": verify}
    taken: dict[str, dict[str, list[float]]] = {place: {way: [] for way in ways} for place in PLACES}
    for _ in range(rounds + 1):
        for place, (shards, cached) in PLACES.items():
            for way, work in ways.items():
                cache(stores[shards].folder, cached)
                taken[place][way].append(in_process(work, stores[shards]))
    return {place: {way: seconds[1:] for way, seconds in ways.items()} for place, ways in taken.items()}


def in_process(work: Callable[..., Any], *given: Any) -> float:
    """The seconds that `work` takes in a newly forked process, so that no memory is reused."""
    fork = multiprocessing.get_context("fork")
    seconds = fork.SimpleQueue()

    def timed() -> None:
        began = time.perf_counter()
        held = work(*given)
        seconds.put(time.perf_counter() - began)
        del held  # freed after the measurement, so that freeing does not count

    process = fork.Process(target=timed)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{work.__name__} failed, see above")
    return float(seconds.get())


def read(store: CheckpointStore) -> Any:
    """Read the bytes of all shards, one after another."""
    manifest = store.manifest(1)
    memory = torch.empty(manifest.bytes, dtype=torch.uint8)
    left = memory.numpy().data
    for name in manifest.shards:
        with (store.path(1) / name).open("rb", buffering=0) as file:
            while count := file.readinto(left):
                left = left[count:]
    return memory


def load_all(store: CheckpointStore) -> Any:
    """Load all tensors, as `export` and `evaluate` do."""
    return load(store.path(1), store.manifest(1))


def torch_load(store: CheckpointStore) -> Any:
    """Load the state written by torch.save."""
    return torch.load(store.folder / STATE, weights_only=True)


def hash_alone(store: CheckpointStore) -> Any:
    """Hash the same number of bytes, without reading them. Their values do not affect the time."""
    manifest, chunk = store.manifest(1), bytes(READ_BYTES)

    def one(name: str) -> None:
        digest = hashlib.sha256()
        for _ in range(0, manifest.files[name]["bytes"], READ_BYTES):
            digest.update(chunk)

    with ThreadPoolExecutor(len(manifest.shards)) as pool:
        return list(pool.map(one, manifest.shards))


def verify(store: CheckpointStore) -> Any:
    """Verify the checkpoint, as `verify` does."""
    return store.verify(1)


def cache(folder: Path, wanted: bool) -> None:
    """Read the files into the page cache, or drop them from it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                if not wanted:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while wanted and file.read(READ_BYTES):
                    pass


if __name__ == "__main__":
    sys.exit(main())

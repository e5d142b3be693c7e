"""How long it takes to verify and load a checkpoint, compared with only reading its bytes.

`python -m benchmarks.restore [--rounds N] [--gigabytes N] [--folder F]`. A state of 1 GB, in one shard and in four,
from the page cache and from the disk (the files are dropped from the page cache where the system allows it). Each
trial runs in a separate process, with fresh memory, and the ways of reading take turns:

    read          one thread reads the bytes into one buffer: the lower bound for `load`
    load          what every rank does: load all tensors, ready to be restored
    torch.load    load the same state from a file written by torch.save, without verification
    hash          SHA-256 over the same number of bytes, one thread per shard: the lower bound for `verify`
    verify        what rank 0 does first: read everything and compare it with the recorded hashes

With four shards in the page cache `load` must take at most 1.2 times as long as `read`; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._measure import spread, write_results
from trainer.checkpoint.pack import load
from trainer.checkpoint.store import READ_BYTES, CheckpointStore
from trainer.checkpoint.writer import CheckpointInfo, CheckpointWriter

LIMIT = 1.2  # times the median of `read`
TENSORS = 250
STATE = "state.pt"
# (number of shards, whether they are in the page cache)
PLACES = {"four shards": (4, True), "one shard": (1, True), "four shards, from the disk": (4, False)}


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if `load` takes too long."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.restore", description="How long it takes to verify and load a checkpoint."
    )
    parser.add_argument("--rounds", type=int, default=3, help="trials of each kind (default: 3)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default: 1)")
    parser.add_argument(
        "--folder", type=Path, help="a folder on the file system to measure (default: the temporary folder)"
    )
    given = parser.parse_args(words)
    if given.rounds < 2:
        parser.error("--rounds must be at least 2")

    load_before = round(os.getloadavg()[0], 1)  # how busy the machine was with other work
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        stores = {shards: CheckpointStore(Path(name) / str(shards)) for shards in (1, 4)}
        for shards, store in stores.items():
            in_process(write, store, given.gigabytes, shards)
        taken = measure(stores, given.rounds)
        size = stores[4].manifest(1).bytes
    results = {place: {way: spread(seconds) for way, seconds in ways.items()} for place, ways in taken.items()}
    ratio = results["four shards"]["load"]["median"] / results["four shards"]["read"]["median"]
    for place, ways in results.items():
        print(f"{'median':>8}  {'10-90 %':>13}  {size / 1e9:.2f} GB, {place}")
        for way, s in ways.items():
            print(f"{s['median']:>6.2f} s  {s['p10']:>5.2f} - {s['p90']:.2f} s  {way}")
    print(f"`load` takes {ratio:.2f} times as long as `read` (limit: {LIMIT}).")
    settings = {
        "load_before": load_before,
        "bytes": size,
        "rounds": given.rounds,
        "limit": LIMIT,
        "ratio": round(ratio, 3),
        "unit": "s",
    }
    write_results("restore", {**settings, "results": results})
    return int(ratio > LIMIT)


def write(store: CheckpointStore, gigabytes: float, shards: int) -> None:
    """Write one checkpoint, with one rank per shard, and the same state with torch.save."""
    keys = dist.HashStore()
    state = {f"tensor {number}": torch.rand(int(gigabytes * 1e9 / 4 / TENSORS)) for number in range(TENSORS)}
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
    """Load all tensors, as every rank does."""
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
    """Verify the checkpoint, as rank 0 does."""
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

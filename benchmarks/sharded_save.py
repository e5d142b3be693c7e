"""What it costs to save and to restore a sharded state, compared with torch.distributed.checkpoint (DCP).

`python -m benchmarks.sharded_save [--rounds N] [--gigabytes N] [--folder F]`. A state of 2 GB is cut by rows over 1, 2,
4 and 8 gloo ranks, as `train.sharding=full` cuts it. The ways take turns, in the same processes, with the same tensors:

    laststep         CheckpointWriter, which hashes and fsyncs; the restore compares every hash
    dcp.async_save   in a thread; fsyncs, no hashes
    dcp.process      dcp.async_save in a process of its own, for as many ranks again
    dcp.save         the same, while training waits
    torch.save       of each rank's rows, and fsync; training waits; no hashes, and only for as many ranks again
    safetensors      the same
    dd               as many bytes from and to nowhere, past the page cache: what the disk can do

Each figure is that of the slowest rank, or of the one with the most bytes: the stall, for which training would wait;
the time until the checkpoint is complete on the disk; the time of the restore into the tensors that the ranks hold,
from files that are dropped from the page cache where the system allows it; the bytes written and read; and the peak
memory of a restore beyond what the rank held before. The first round, which fills reusable buffers, is dropped.

With N ranks a rank of Laststep must write and read at most an Nth of the state and EXTRA_MB, and hold two pieces more
than that during its restore; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import linecache
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks._measure import Check, conclude
from benchmarks.restore import cache, io_so_far, status_of
from laststep.checkpoint.restore import PIECE_BYTES, NewestCheckpoint
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.ranks.group import Group, register_rank
from laststep.ranks.world import ShardPlace, World, shard_rows

SIZES = (1, 2, 4, 8)
TENSORS = 100
COLUMNS = 1000
EXTRA_MB = 30.0
DEADLINE_S = 1200.0
OURS, ASYNC_SAVE, PROCESS, SAVE = "laststep", "dcp.async_save", "dcp.process", "dcp.save"
TORCH_SAVE, SAFETENSORS, DD = "torch.save", "safetensors", "dd"
WAYS = (OURS, ASYNC_SAVE, PROCESS, SAVE, TORCH_SAVE, SAFETENSORS, DD)
# What a thread is doing, by what stands in the line of Python that it is in.
PHASES = {
    "os.fsync": "sync",
    ".update(": "hash",
    "self.fn(": "hash",  # a pool calls it without a function of ours
    "os.write": "write",
    "preadv": "read",
    ".copy_(": "copy",
    "broadcast": "send",
    "madvise": "free memory",
    "mmap.mmap": "get memory",
}
SAMPLE_S = 0.001

Figures = dict[str, float]


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.sharded_save", description="What it costs to save shards.")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind (default: 3)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the state (default: 2)")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="numbers of ranks (default: 1 2 4 8)")
    parser.add_argument(
        "--folder", type=Path, help="a folder on the file system to measure (default: the temporary folder)"
    )
    given = parser.parse_args(words)
    load_before = round(os.getloadavg()[0], 1)  # how busy the machine was with other work
    rows = int(given.gigabytes * 1e9 / 4 / COLUMNS / TENSORS)
    results, profiles = {}, {}
    for size in given.ranks:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            results[size], profiles[size] = measured(size, rows, given.rounds, Path(folder))
    missed = print_table(results, 4 * rows * COLUMNS * TENSORS)
    for size, profile in profiles.items():
        for part, seconds in profile.items():
            print(f"{size:>5}  {part:<8}", "  ".join(f"{phase} {taken:.2f} s" for phase, taken in seconds.items()))
    settings = {"load_before": load_before, "bytes": 4 * rows * COLUMNS * TENSORS, "rounds": given.rounds}
    check = Check("sizes at which a rank writes, reads or holds more than its share", 0, [missed])
    return conclude("sharded_save", {**settings, "results": results, "profiles": profiles}, [check])


def print_table(results: dict[int, dict[str, Figures]], size: int) -> int:
    """Print the figures; returns how often a limit was missed."""
    missed = 0
    print(
        f"{'ranks':>5}  {'':<14}  {'stall':>7}  {'save':>7}  {'restore':>7}  {'written':>9}  {'read':>9}  {'memory':>9}"
    )
    for ranks, ways in results.items():
        for way, f in ways.items():
            part = size / 1e6 / ranks + EXTRA_MB
            most = (f["written_mb"], f["read_mb"], f["memory_mb"] - 2 * PIECE_BYTES / 1e6)
            fails = way == OURS and max(most) > part
            missed += fails
            print(
                f"{ranks:>5}  {way:<14}  {f['stall_s']:>5.2f} s  {f['save_s']:>5.2f} s  {f['restore_s']:>5.2f} s  "
                f"{f['written_mb']:>6.0f} MB  {f['read_mb']:>6.0f} MB  {f['memory_mb']:>6.0f} MB"
                f"{' MISSED' if fails else ''}"
            )
    return missed


def measured(size: int, rows: int, rounds: int, folder: Path) -> tuple[dict[str, Figures], dict[str, Figures]]:
    """The median figures of the slowest of `size` ranks, by way; and the seconds that rank 0's threads spend in each
    phase of a save and of a restore."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(size)]
    ranks = [
        fork.Process(target=_rank, args=(rank, size, rows, rounds, folder, pipe))
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        if not all(pipe.poll(DEADLINE_S) for pipe, _ in pipes):
            raise TimeoutError(f"{size} ranks did not end within {DEADLINE_S:.0f} s")
        answers = [pipe.recv() for pipe, _ in pipes]
        found: list[dict[str, list[Figures]]] = [figures for figures, _ in answers]
    finally:
        for process in ranks:
            process.join(30)
            process.kill()

    def figure(way: str, name: str) -> float:
        each = [max(one[way][number][name] for one in found) for number in range(1, rounds + 1)]
        return round(statistics.median(each), 3)

    return {way: {name: figure(way, name) for name in found[0][way][0]} for way in WAYS}, answers[0][1]


class Sampler:
    """Looks a thousand times a second at what each thread of this process is doing, in a `with` block."""

    def __init__(self) -> None:
        self.seconds: dict[str, Figures] = {"save": {}}
        self._part, self._ended = "save", threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for seconds in self.seconds.values():
            seconds.update({phase: round(taken, 2) for phase, taken in seconds.items()})

    def turn_to(self, part: str) -> None:
        """What is seen from now on belongs to another part."""
        self.seconds[part] = {}
        self._part = part

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(SAMPLE_S):
            now = time.perf_counter()
            seconds = self.seconds[self._part]
            for frame in sys._current_frames().values():
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)  # 0: between two lines
                if phase := next((phase for words, phase in PHASES.items() if words in line), None):
                    seconds[phase] = seconds.get(phase, 0.0) + now - last
            last = now


class Rank:
    """One rank with its shard of the state."""

    def __init__(self, group: Group, rows: int, folder: Path) -> None:
        self.group, self.folder = group, folder
        world = group.world
        self.place = ShardPlace(world.rank, world.size, 0, 1)
        self.store = CheckpointStore(folder / OURS)
        self.writer = CheckpointWriter(self.store, group.store, world.rank, world.size, group.device, self.place)
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
        self.state = {f"tensor {number}": self._tensor(rows, mesh) for number in range(TENSORS)}

    def _tensor(self, rows: int, mesh: DeviceMesh) -> Tensor:
        begin, end = shard_rows(rows, self.place.shard, self.place.shards)
        local = torch.rand(end - begin, COLUMNS)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, COLUMNS)), stride=(COLUMNS, 1)
        )

    def round(self, number: int) -> dict[str, Figures]:
        """One save and one restore in each way."""
        return {way: self._save_and_restore(way, number) for way in WAYS}

    def profile(self, number: int) -> dict[str, Figures]:
        """The seconds that this rank's threads spend in each phase of a save and of a restore."""
        with Sampler() as sampler:
            self._save_and_restore(OURS, number, lambda: sampler.turn_to("restore"))
        return sampler.seconds

    def _save_and_restore(self, way: str, number: int, saved: Callable[[], None] = lambda: None) -> Figures:
        path = self.folder / f"{way} {number}"
        self.group.barrier(DEADLINE_S)
        before, began = io_so_far(), time.perf_counter()
        end = self._start(way, number, path)
        stall = time.perf_counter() - began
        end()
        self.group.barrier(DEADLINE_S)
        save, written = time.perf_counter() - began, io_so_far()["wchar"] - before["wchar"]
        if self.group.world.rank == 0:
            cache(self.store.folder if way == OURS else path, False)
        self.group.barrier(DEADLINE_S)
        saved()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (man 5 proc)
        before, held, began = io_so_far(), status_of("VmRSS"), time.perf_counter()
        self._restore(way, number, path)
        restore, read = time.perf_counter() - began, io_so_far()["rchar"] - before["rchar"]
        memory = status_of("VmHWM") - held
        self.group.barrier(DEADLINE_S)
        if self.group.world.rank == 0:
            shutil.rmtree(self.store.folder if way == OURS else path)
        return {
            "stall_s": round(stall, 4),
            "save_s": round(save, 3),
            "restore_s": round(restore, 3),
            "written_mb": round(written / 1e6, 1),
            "read_mb": round(read / 1e6, 1),
            "memory_mb": round(memory / 1e6, 1),
        }

    def _start(self, way: str, number: int, path: Path) -> Callable[[], object]:
        """Start a save; what this returns waits for its end."""
        if way == OURS:
            state = {"position": {"step": number}, "model": self.state}
            self.writer.start(CheckpointInfo(number, 1, number, {}), state, lambda: None, 1, 0)
            return self._wait
        if way == SAVE:
            dcp.save(dict(self.state), checkpoint_id=path)
            return lambda: None
        if way in (TORCH_SAVE, SAFETENSORS, DD):
            self._write_alone(way, path)
            return lambda: None
        kind = AsyncCheckpointerType.PROCESS if way == PROCESS else AsyncCheckpointerType.THREAD
        saving = dcp.async_save(dict(self.state), checkpoint_id=path, async_checkpointer_type=kind)
        assert isinstance(saving, Future)
        return saving.result

    def _wait(self) -> None:
        if not self.writer.wait(DEADLINE_S) or self.writer.error:
            raise self.writer.error or TimeoutError("a save did not end")

    def _write_alone(self, way: str, path: Path) -> None:
        """Write this rank's rows into a file of its own."""
        path.mkdir(exist_ok=True)
        file, rows = path / f"{self.group.world.rank}", self._rows()
        if way == DD:
            count = sum(each.nbytes for each in rows.values()) >> 20
            words = ["dd", "if=/dev/zero", f"of={file}", "bs=16M", f"count={count}M", "iflag=count_bytes"]
            subprocess.run([*words, "oflag=direct", "conv=fsync"], check=True, stderr=subprocess.DEVNULL)
            return
        torch.save(rows, file) if way == TORCH_SAVE else save_file(rows, file)
        with file.open("rb") as written:
            os.fsync(written.fileno())

    def _rows(self) -> dict[str, Tensor]:
        return {name: each.to_local() for name, each in self.state.items() if isinstance(each, DTensor)}

    def _read_alone(self, way: str, path: Path) -> None:
        """Read this rank's file into its rows."""
        file = path / f"{self.group.world.rank}"
        if way == DD:
            words = ["dd", f"if={file}", "of=/dev/null", "bs=16M", "iflag=direct"]
            subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
            return
        found = torch.load(file, weights_only=True) if way == TORCH_SAVE else load_file(file)
        for name, rows in self._rows().items():
            rows.copy_(found[name])

    def _restore(self, way: str, number: int, path: Path) -> None:
        if way in (TORCH_SAVE, SAFETENSORS, DD):
            return self._read_alone(way, path)
        if way != OURS:
            return dcp.load(dict(self.state), checkpoint_id=path)
        group = copy.copy(self.group)  # an attempt restores once, with keys that nobody has set before
        group.store = group.store.with_prefix(f"round {number}")
        candidates = self.store.candidates(print) if group.world.rank == 0 else iter(())
        checkpoint = NewestCheckpoint(self.store, group, candidates, print, lambda count: None).finish()
        assert checkpoint is not None
        checkpoint.load({"model": self.state}, lambda: None)


def _rank(rank: int, size: int, rows: int, rounds: int, folder: Path, answer: Connection) -> None:
    """The body of a rank's process."""
    torch.set_num_threads(1)
    hosts = ("localhost",) * size
    world = World(rank, size, rank, size, 0, 1, hosts, "sharded", 0, "sharded-0", "benchmark", False)
    try:
        group = register_rank(world, torch.device("cpu"), "gloo", folder / "meeting" / "sharded.json", DEADLINE_S)
        group.connect(DEADLINE_S)
        group.connect_alone()
        one = Rank(group, rows, folder)
        figures = [one.round(number) for number in range(1, rounds + 2)]
        profile = one.profile(rounds + 2)
        answer.send(({way: [each[way] for each in figures] for way in WAYS}, profile))
        one.writer.close()
        group.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others wait for this rank: the deadline ends them


if __name__ == "__main__":
    sys.exit(main())

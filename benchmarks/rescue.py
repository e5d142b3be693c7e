"""The time of a rescue compared with a plain parallel write of the same state.

`python -m benchmarks.rescue [--gigabytes G] [--ranks N] [--rounds N] [--folder F]`. Gloo ranks hold the same state. In
turn they write it together as plainly as possible (a stripe each, hashed and fsynced; a barrier; one rank commits), and
rescue it: they sign in, agree through the folder, write, commit and leave. With `--killed` one more rank is missing, so
the survivors also wait for it. A rescue may take at most 1.5 times as long as the plain write before it; if the median
misses that by more than the noise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._measure import DEADLINE_S, Check, conclude
from benchmarks.save import file_system
from laststep.attempt.rescue import Rescue
from laststep.attempt.rescue_plan import Assignment, Holding
from laststep.checkpoint.files import FileEntry, Stripe
from laststep.checkpoint.frozen import ChunkBuffers, FrozenState
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import WRITE_BYTES, CheckpointInfo
from laststep.ranks.fault import Fault
from laststep.ranks.seal import Seal

LIMIT = 1.5
STEP = 1000


def main(words: list[str] | None = None) -> int:
    """Measure, print both times and their ratio, write the results; returns 1 if the ratio is over the limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.rescue", description="The time of a rescue.")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the state (default: 2)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that hold it (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="writes of each kind (default: 5)")
    parser.add_argument("--killed", action="store_true", help="one more rank is missing, and waited for")
    parser.add_argument(
        "--folder", type=Path, help="a folder on the file system to measure (default: the temporary folder)"
    )
    given = parser.parse_args(words)

    torch.set_num_threads(1)
    # Made before the ranks are forked, so that they share its memory.
    state = {"weights": torch.arange(int(given.gigabytes * 1e9) // 8), "position": {"step": STEP}}
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        where = {"file_system": file_system(folder), "load_before": load}
        taken = measure(state, folder, given.ranks, given.rounds, given.killed)
    plain, rescue = (statistics.median(seconds) for seconds in taken)
    ratios = [ours / theirs for theirs, ours in zip(*taken)]
    print(f"{given.gigabytes:g} GB, {given.ranks} ranks, {given.rounds} writes of each kind, medians")
    print(f"plain parallel write {plain:.2f} s, rescue {rescue:.2f} s")
    figures = {"plain_s": round(plain, 3), "rescue_s": round(rescue, 3)}
    options = {"gigabytes": given.gigabytes, "ranks": given.ranks, "rounds": given.rounds, "killed": given.killed}
    check = Check("rescue / plain parallel write", LIMIT, ratios)
    return conclude("rescue_killed" if given.killed else "rescue", {**where, **options, **figures}, [check])


def measure(state: object, folder: Path, size: int, rounds: int, killed: bool) -> tuple[list[float], list[float]]:
    """Seconds that each plain write and each rescue took, until the last rank was done."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    ranks = [
        context.Process(target=_rank, args=(rank, size, state, folder, rounds, killed, there)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        if not here.poll(DEADLINE_S * (1 + rounds)):
            raise TimeoutError("the ranks did not end; is the disk full?")
        taken: tuple[list[float], list[float]] = here.recv()
        for process in ranks:
            process.join(DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
    return taken


def _rank(rank: int, size: int, state: object, folder: Path, rounds: int, killed: bool, answer: Connection) -> None:
    """The body of a rank's process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "keys"), size), rank=rank, world_size=size)
    plain, rescued = [], []
    for number in range(rounds + 1):
        plain.append(_timed(lambda store: _write_plainly(state, store, rank, size), folder / f"plain {number}", rank))
        place = folder / f"rescue {number}"
        rescued.append(
            _timed(lambda store: _rescue(state, store, place / "agreed", rank, size, killed), place, rank)  # noqa: B023
        )
    if rank == 0:
        answer.send((plain[1:], rescued[1:]))  # the first ones fill caches
    dist.barrier()
    dist.destroy_process_group()


def _timed(work: Callable[[CheckpointStore], None], folder: Path, rank: int) -> float:
    """Seconds that all ranks take for `work`; what they saved is checked and deleted."""
    store = CheckpointStore(folder / "checkpoints")
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    began = time.perf_counter()
    work(store)
    dist.barrier()
    taken = time.perf_counter() - began
    if rank == 0:
        if store.steps() != [STEP]:
            raise RuntimeError(f"{folder}: nothing was saved")
        shutil.rmtree(folder)
        os.sync()  # data not yet written by one way must not slow down the other
    dist.barrier()
    return taken


def _frozen(state: object, store: CheckpointStore, size: int) -> FrozenState:
    buffer = torch.empty(WRITE_BYTES, dtype=torch.uint8)
    return FrozenState(
        store, CheckpointInfo(STEP, 1, STEP, {}), state, size, lambda: None, ChunkBuffers(buffer), lambda: True
    )


def _write_plainly(state: object, store: CheckpointStore, rank: int, size: int) -> None:
    frozen = _frozen(state, store, size)
    entry = frozen.write_part("plain", 0, Stripe(rank, size), f"part {rank}", lambda: None)
    entries: list[FileEntry | None] = [None] * size
    dist.all_gather_object(entries, entry)
    if rank == 0:
        written = [entry for entry in entries if entry is not None]
        frozen.commit("plain", {f"part {number}": entry for number, entry in enumerate(written)})


def _rescue(state: object, store: CheckpointStore, folder: Path, rank: int, size: int, killed: bool) -> None:
    recorded = threading.Event()
    rescue = Rescue(folder, rank, size + killed, recorded.is_set, Seal(b"the same on every rank"))
    rescue.sign_in(Fault("failed", "a rank is gone", cause=False), began_step=True)
    rescue.start()
    frozen = _frozen(state, store, size)
    rescue.announce(Holding((STEP, 0, False, False), frozen.bytes, saved=False))
    while (duty := rescue.next_duty()) is not None:
        plan = rescue.plan
        assert plan is not None
        if isinstance(duty, Assignment):
            stripe = Stripe(duty.number, duty.of)
            entry = frozen.write_part(plan.generation, 0, stripe, duty.file, lambda: rescue.check(duty))
            rescue.report_written(plan, duty, entry)
        else:
            frozen.commit(plan.generation, plan.written)
            recorded.set()
            rescue.report_acted(plan)
    rescue.close()


if __name__ == "__main__":
    sys.exit(main())

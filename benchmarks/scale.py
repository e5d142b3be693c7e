"""The costs that grow with the number of ranks, measured with the real code and simulated ranks.

`python -m benchmarks.scale [--most N]`, a few minutes. Each rank is simulated by a thread with its own connection; all
of them share this machine and a key-value store in a separate process. Ranks on separate machines would take less time,
except for the store's share, so the processor time of the store is reported too. Only the open files are counted in
real ranks. docs/scale.md draws the conclusions. torch asks the name server for the name of every peer that it connects
to; to exclude that, the figures there were measured without a reachable name server: `unshare --net sh -c 'ip link set
lo up; python -m benchmarks.scale'`, as root.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from benchmarks._measure import DEADLINE_S, write_results
from laststep.attempt.rescue import Rescue, write_fields
from laststep.attempt.rescue_plan import Holding, Survivor
from laststep.checkpoint.pack import load
from laststep.checkpoint.store import CheckpointStore
from laststep.checkpoint.writer import CheckpointInfo, CheckpointWriter
from laststep.ranks.group import register_rank
from laststep.ranks.process import Signals
from laststep.ranks.seal import Seal
from laststep.ranks.stop import Stop
from laststep.ranks.watchdog import Beat, Probes, Watchdog
from laststep.ranks.world import World
from laststep.rundir import RunDir
from laststep.runs.run_logs import MergedLogs

SIZES = (2, 8, 32, 128, 512, 1024)
REAL = (2, 4, 8)  # numbers of real ranks, for the count of open files
ROUNDS = 3
PER_RANK = 2  # connections, as Stop uses two
STATE = 16 << 20  # bytes of a checkpoint, for any number of ranks
LINES = 20  # in the log of each rank
CARD = json.dumps({"host": "node0001", "pid": "123456", "ours": "10.0.0.1", "theirs": "10.0.0.2"})
TIMEOUT = timedelta(seconds=DEADLINE_S)


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale", description="The costs that grow with the number of ranks."
    )
    parser.add_argument("--most", type=int, default=SIZES[-1], help=f"largest number of ranks (default: {SIZES[-1]})")
    most = parser.parse_args(words).most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    torch.set_num_threads(1)

    files = {size: open_files(size) for size in REAL}
    sizes = [size for size in SIZES if size <= most]
    with served() as (port, store), tempfile.TemporaryDirectory() as folder:
        clients = connect(port, PER_RANK * sizes[-1])
        taken = {
            size: [measure(store, clients, size, Path(folder) / f"{size}-{n}", n) for n in range(ROUNDS)]
            for size in sizes
        }
    median = {
        size: {name: round(statistics.median(one[name] for one in rounds), 5) for name in rounds[0]}
        for size, rounds in taken.items()
    }
    print(f"{'ms':>30}{''.join(f'{size:>9}' for size in sizes)} ranks")
    for name in median[sizes[0]]:
        print(f"{name:>30}{''.join(f'{1000 * median[size][name]:>9.2f}' for size in sizes)}")
    print(f"open files of rank 0: {', '.join(f'{count} with {size} ranks' for size, count in files.items())}")
    results = {"rounds": ROUNDS, "state_bytes": STATE, "log_lines": LINES, "open_files_limit": soft}
    write_results("scale", {**results, "open_files": files, "unit": "s", "ranks": median})
    return 0


def measure(store: int, clients: list[dist.Store], size: int, folder: Path, number: int) -> dict[str, float]:
    """Seconds that each operation takes with `size` ranks; `store` is the pid of the process that serves `clients`."""
    world = World(0, size, 0, 1, 0, size, ("node",) * size, "scale", 0, "scale-0", "benchmark", False)
    stores = [dist.PrefixStore(f"{size}/{number}", client) for client in clients]
    taken = {}
    for name, work in (
        ("meeting", lambda: _meeting(stores, size)),
        ("a beat", lambda: _beat(stores, size)),
        ("agreeing on a stop", lambda: _agreement(stores, world)),
    ):
        before = processor_s(store)
        taken[name] = work()
        taken[f"{name}: the store"] = processor_s(store) - before
    return {
        **taken,
        "comparing beats": _compare(stores, world),
        **_checkpoint(stores, size, folder / "checkpoints"),
        **_rescue(folder / "rescue", size),
        "logs": _logs(RunDir(folder / "run"), size),
    }


def _meeting(stores: list[dist.Store], size: int) -> float:
    """Every rank writes its card, waits for all cards, and reads them, as in `laststep.ranks.group`."""
    keys = [f"met/{rank}" for rank in range(size)]

    def one(rank: int) -> None:
        stores[rank].compare_set(keys[rank], "", CARD)
        stores[rank].wait(keys, TIMEOUT)
        stores[rank].multi_get(keys)

    return together(one, size)


def _beat(stores: list[dist.Store], size: int) -> float:
    """Every rank's heartbeat, which it writes twice a second."""

    def one(rank: int) -> None:
        stores[rank].set(f"watch/beat/{rank}", _heartbeat())
        stores[rank].check(["watch/fault"])

    return together(one, size)


def _heartbeat() -> str:
    where = "_engine_run_backward (/opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py:829)"
    return json.dumps(asdict(Beat("node0001", 1000, 5000, "training", where, False, 1234.5)))


def _compare(stores: list[dist.Store], world: World) -> float:
    """Rank 0 reads all heartbeats and compares them, also twice a second."""
    watch = Watchdog(Probes(world=lambda: world), DEADLINE_S, on_fault=print)
    began = time.perf_counter()
    beats = stores[0].multi_get([f"watch/beat/{rank}" for rank in range(world.size)])
    watch._compare([Beat(**json.loads(beat)) for beat in beats])
    taken = time.perf_counter() - began
    watch.close()
    return taken


def _agreement(stores: list[dist.Store], world: World) -> float:
    """From the notice of a signal until every rank knows the last step."""
    stops = []
    for rank in range(world.size):
        own = _Store(stores[PER_RANK * rank : PER_RANK * (rank + 1)])
        rank_of = World(**{**vars(world), "rank": rank})
        stops.append(Stop(rank_of, cast(dist.Store, own), Signals(), on_failure=print))
    time.sleep(0.5 + world.size / 1000)  # until all threads are waiting
    began = time.perf_counter()
    stops[0]._write_notice(stops[0]._notices, 15)
    for stop in stops:
        stop._thread.join(DEADLINE_S)
    taken = time.perf_counter() - began
    if not all(stop._agreed.is_set() for stop in stops):
        raise TimeoutError(f"{world.size} ranks did not agree in {taken:.1f} s; is the machine busy?")
    return taken


class _Store:
    """Stands in for a store whose `clone` would open a connection: hands out existing ones."""

    def __init__(self, connections: list[dist.Store]) -> None:
        self._rest = iter(connections)

    def clone(self) -> dist.Store:
        """The next existing connection."""
        return next(self._rest)


def _checkpoint(stores: list[dist.Store], size: int, folder: Path) -> dict[str, float]:
    """A save by all ranks up to its commit; then its verification and loading by one rank."""
    store = CheckpointStore(folder)
    state = {"tensor": torch.zeros(STATE, dtype=torch.uint8)}
    savers = [
        CheckpointWriter(store, cast(dist.Store, _Store([stores[rank]])), rank, size, torch.device("cpu"))
        for rank in range(size)
    ]
    about = CheckpointInfo(1, 1, 1, {})
    for saver in savers:  # a first save, not measured, which allocates the buffers
        saver.start(about, state, lambda: None, 1, 0)
    _ended(savers)
    began = time.perf_counter()
    for saver in savers:
        saver.start(about, state, lambda: None, 1, 0)
    _ended(savers)
    saved = time.perf_counter()
    manifest = store.verify(1)
    verified = time.perf_counter()
    load(store.path(1), manifest)
    loaded = time.perf_counter()
    for saver in savers:
        saver.close()
    return {"save": saved - began, "verify": verified - saved, "restore": loaded - verified}


def _ended(savers: list[CheckpointWriter]) -> None:
    for saver in savers:
        if not saver.wait(DEADLINE_S) or saver.error:
            raise saver.error or TimeoutError(f"a save took {DEADLINE_S:.0f} s")


def _rescue(folder: Path, size: int) -> dict[str, float]:
    """A round of the leader, which reads the files of all other survivors, and one of another survivor."""
    folder.mkdir(parents=True)
    seal = Seal()
    holding = Holding((5000, 0, False, False), STATE, saved=False)
    for rank in range(1, size):
        fields = asdict(Survivor(rank, began_step=True, beat=1, frozen=True, holdings=(holding,)))
        write_fields(folder / f"rank_{rank}.json", fields, seal)
    leader, other = (Rescue(folder, rank, size, lambda: False, seal) for rank in (0, 1))
    taken = {}
    for name, one in (("rescue: the leader", leader), ("rescue: another rank", other)):
        one.sign_in(None, began_step=True)
        one.announce(holding)
        began = time.perf_counter()
        one.round()
        taken[name] = time.perf_counter() - began
    return taken


def _logs(run: RunDir, size: int) -> float:
    """`launch.py logs` reads and merges the logs of `size` ranks from one attempt."""
    run.logs.mkdir(parents=True)
    run.submissions.write_text(json.dumps({"job_id": "7", "time": 0.0}) + "\n")
    text = "".join(f"[laststep 12:00:{number:02}] step {number}\n" for number in range(LINES))
    for rank in range(size):
        (run.logs / f"7_{rank}_log.out").write_text(text)
    began = time.perf_counter()
    lines = list(MergedLogs(run).read(whole=True))
    taken = time.perf_counter() - began
    if len(lines) != size * LINES:
        raise RuntimeError(f"read {len(lines)} lines from {size} logs instead of {size * LINES}")
    return taken


def together(work: Callable[[int], None], size: int) -> float:
    """Seconds until `size` threads that start at the same time have finished `work`."""
    begin, ready = threading.Event(), threading.Barrier(size + 1)

    def one(rank: int) -> None:
        ready.wait()
        begin.wait()
        work(rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    begin.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    return time.perf_counter() - began


def processor_s(process: int) -> float:
    """Processor time used so far by all threads of a process (Linux, Documentation/scheduler/sched-stats.rst)."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def served() -> Iterator[tuple[int, int]]:
    """Serve a key-value store, as rank 0 does, in a separate process; yields its port and pid."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(its,), daemon=True)
    process.start()
    try:
        if not ours.poll(DEADLINE_S):
            raise TimeoutError(f"the store did not start within {DEADLINE_S:.0f} s")
        yield ours.recv(), process.pid or 0
    finally:
        process.kill()
        process.join()


def _serve(port: Connection) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = socket.create_server(("", 0), backlog=2048)
    number = listener.getsockname()[1]
    store = dist.TCPStore("localhost", number, 1, True, TIMEOUT, False, master_listen_fd=listener.detach())
    port.send(number)
    threading.Event().wait()
    del store


def connect(port: int, count: int) -> list[dist.Store]:
    """Open `count` connections to the store, 64 at a time."""
    with ThreadPoolExecutor(64) as pool:
        made = pool.map(lambda _: dist.TCPStore("localhost", port, 1, False, TIMEOUT, False), range(count))
        return list(made)


def open_files(size: int) -> int:
    """The number of open files in rank 0 of `size` real ranks, with all the connections of a training run."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, size, Path(folder), its)) for rank in range(size)]
        for process in ranks:
            process.start()
        try:
            if not ours.poll(DEADLINE_S):
                raise TimeoutError(f"{size} ranks did not meet within {DEADLINE_S:.0f} s")
            count: int = ours.recv()
            for process in ranks:
                process.join(DEADLINE_S)
        finally:
            for process in ranks:
                process.kill()
    return count


def _rank(rank: int, size: int, folder: Path, answer: Connection) -> None:
    """The body of a rank's process."""
    world = World(rank, size, rank, size, 0, 1, ("localhost",) * size, "scale", 0, "scale-0", "benchmark", False)
    group = register_rank(world, torch.device("cpu"), "gloo", folder / "meeting" / "scale.json", DEADLINE_S)
    group.connect(DEADLINE_S)
    watch = Watchdog(Probes(world=lambda: world), DEADLINE_S, on_fault=print)
    watch.join(group.store, group.host, group.seal)
    stop = Stop(world, group.store, Signals(), on_failure=print)
    saver = CheckpointWriter(CheckpointStore(folder), group.store, rank, size, group.device)
    group.gather(torch.ones(1))
    group.barrier(DEADLINE_S)
    if rank == 0:
        answer.send(len(os.listdir("/proc/self/fd")))
    group.barrier(DEADLINE_S)
    watch.close()
    stop.close()
    saver.close()
    group.close()


if __name__ == "__main__":
    sys.exit(main())

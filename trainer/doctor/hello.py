"""hello: ranks meet as those of a run do, say who they are, add up ones, and measure how fast they are together.

`python -m trainer hello` does it under any launcher, all but the measuring; `launch.py doctor --nodes` makes it a job.
Importing this imports no torch.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.config import Config
from trainer.rundir import RunDir
from trainer.world.launchers import detect_world
from trainer.world.world import World

if TYPE_CHECKING:
    import torch

    from trainer.world.group import Group

MIB = 2**20
SIZES = tuple(mib * MIB for mib in (1, 4, 16, 64, 256))  # bytes of a buffer that is all-reduced
REPEATS = 5  # of each, after one that does not count
# On CPUs, where a size takes longer than this, the next, four times as large, is left out.
LONG_S = 2.0
PRODUCTS, EDGE = 10, 1024  # a rank's own work: so many products of square matrices of this edge


@dataclass(frozen=True)
class Greeting:
    """What one rank has to say."""

    rank: int
    size: int
    host: str
    backend: str
    address: str  # of the store at which the ranks met
    total: float  # the sum of a one from every rank
    work_s: float = 0.0  # for its own work, while all others did theirs
    all_reduce_s: dict[int, list[float]] = field(default_factory=dict)  # bytes -> the time of each repeat

    def __str__(self) -> str:
        return f"[{self.address}] hello from [{self.host}:{self.backend}] rank {self.rank}/{self.size}"


class Hello:
    """What each rank of doctor's job does; `folder` is one of this job alone that all ranks see."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder

    def __call__(self) -> Greeting:
        """Meet the others, add up, measure. Raises MeetingError, with the names of those that did not come."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it, and here is nothing to save
        world = detect_world()
        sign(self.folder, world)
        # After the signature, so that a rank that is still importing, from a slow disk say, is not taken for absent.
        from trainer.world.join import join

        group = join(self.config, world, RunDir(self.folder).meeting(world.attempt), timeout_s=0)
        group.connect(timeout_s=0)
        greeting = measure(group)
        print(greeting, flush=True)
        group.close()
        return greeting


def sign(folder: Path, world: World) -> None:
    """Note that this rank has started, and where."""
    (folder / f"came-{world.rank}").write_text(world.host_of(world.rank))


def came(folder: Path) -> dict[int, str]:
    """The ranks that have started, and their hosts."""
    return {int(path.name.removeprefix("came-")): path.read_text() for path in folder.glob("came-*")}


def greet(group: Group) -> Greeting:
    """Say who this rank is, and add up with all others."""
    world = group.world
    return Greeting(
        rank=world.rank,
        size=world.size,
        host=world.host_of(world.rank),
        backend=group.backend if world.size > 1 else "alone",
        address=group.address or "nobody to meet",
        total=_total(group),
    )


def measure(group: Group) -> Greeting:
    """The same, and how fast this rank is."""
    return replace(greet(group), work_s=_own_work(group), all_reduce_s=_all_reduces(group))


def at_rank_0(group: Group, greeting: Greeting, variables: dict[str, str]) -> list[tuple[Greeting, dict[str, str]]]:
    """The greeting and the environment of every rank, in rank order, on rank 0; on the others nothing."""
    group.store.set(f"hello/{group.world.rank}", json.dumps([asdict(greeting), variables]))
    if group.world.rank:
        return []
    said = [json.loads(group.store.get(f"hello/{rank}")) for rank in range(group.world.size)]
    return [(Greeting(**greeting), variables) for greeting, variables in said]


def bus_bandwidth(size: int, ranks: int, seconds: float) -> float:
    """Bytes per second through the narrowest link of an ideal all-reduce, whatever the number of ranks: what nccl-tests
    calls bus bandwidth (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks * size / seconds


def all_reduce_times(greetings: Sequence[Greeting]) -> dict[int, float]:
    """Seconds by bytes: the median of the repeats, each as long as its slowest rank took."""
    times = [greeting.all_reduce_s for greeting in greetings]
    return {size: statistics.median(map(max, zip(*(one[size] for one in times)))) for size in times[0]}


def work_times(greetings: Sequence[Greeting]) -> dict[str, float]:
    """Seconds by host that its slowest rank needs for its own work, the slowest host first."""
    slowest: dict[str, float] = {}
    for one in greetings:
        slowest[one.host] = max(one.work_s, slowest.get(one.host, 0.0))
    return dict(sorted(slowest.items(), key=lambda item: -item[1]))


def wrong_sums(greetings: Sequence[Greeting]) -> list[str]:
    """What was added up wrong, by rank; nothing, if the ranks can be relied on."""
    wrong = [one for one in greetings if one.total != one.size]
    return [f"rank {one.rank} on {one.host}: a sum of {one.size} ones is {one.total:g}" for one in wrong]


def report(greetings: Sequence[Greeting]) -> list[str]:
    """All that the ranks measured, in lines."""
    ranks = greetings[0].size
    lines = wrong_sums(greetings) or [f"sum of ones: {ranks} on every rank"]
    times = all_reduce_times(greetings)
    if times:
        lines += ["", "all-reduce      time  bus bandwidth"]
        for size, seconds in times.items():
            bandwidth = bus_bandwidth(size, ranks, seconds)
            lines.append(f"{size // MIB:>6} MiB {1000 * seconds:>6.1f} ms {bandwidth / 1e9:>9.2f} GB/s")
        if len(times) < len(SIZES):
            lines.append(f"(larger ones left out, as this took over {LONG_S:g} s)")
        lines.append(f"(2(N-1)/N x bytes / time, as in nccl-tests; the slowest rank's time, median of {REPEATS})")
    work = work_times(greetings)
    usual = statistics.median(work.values())
    lines += ["", "own work of each host, slowest first"]
    lines += [f"{1000 * seconds:>8.0f} ms {seconds / usual:>6.2f} x median  {host}" for host, seconds in work.items()]
    lines.append(f"({PRODUCTS} products of {EDGE} x {EDGE} matrices, all ranks at once, without the network;")
    lines.append(" each by its own clock, and a host's slowest rank counts)")
    return lines


def _total(group: Group) -> float:
    import torch
    import torch.distributed as dist

    one = torch.ones(1, device=group.device)
    if group.world.size > 1:
        dist.all_reduce(one)
    return one.item()


def _own_work(group: Group) -> float:
    """Seconds that a fixed piece of work takes, done by all ranks at once, without a word between them."""
    import torch

    matrix = torch.rand(EDGE, EDGE, device=group.device) / EDGE
    matrix @ matrix  # the first one pays for loading the library
    _together(group)
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        matrix = matrix @ matrix
    _finished(group.device)
    return time.perf_counter() - began


def _all_reduces(group: Group) -> dict[int, list[float]]:
    """Seconds of each repeat, by bytes."""
    times: dict[int, list[float]] = {}
    if group.world.size == 1:
        return times
    for size in SIZES:
        times[size] = _all_reduce(group, size)
        too_long = group.device.type == "cpu" and statistics.median(times[size]) > LONG_S
        if group.broadcast_bool(too_long):
            break
    return times


def _all_reduce(group: Group, size: int) -> list[float]:
    """Seconds of each repeat of an all-reduce of `size` bytes. Raises RuntimeError when a sum is wrong."""
    import torch
    import torch.distributed as dist

    buffer = torch.empty(size // 4, device=group.device)  # float32
    times = []
    for _ in range(1 + REPEATS):
        buffer.fill_(1)
        _together(group)
        began = time.perf_counter()
        dist.all_reduce(buffer)
        _finished(group.device)
        times.append(time.perf_counter() - began)
    if not bool((buffer == group.world.size).all()):
        raise RuntimeError(f"rank {group.world.rank}: an all-reduce of {size} bytes gave a wrong sum")
    return times[1:]


def _together(group: Group) -> None:
    """Wait until all ranks are here and what they have given their devices is done."""
    import torch.distributed as dist

    if group.world.size > 1:
        dist.barrier()
    _finished(group.device)


def _finished(device: torch.device) -> None:
    """Wait for what the device was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""hello: the ranks meet as in a run, say who they are, sum a one from each, and measure their speed together.

`launch.py doctor --nodes` runs it as a job. `python -m laststep hello` runs it under any launcher, without the speed
measurement. Importing this module does not import torch.
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

from laststep.attempt.preflight import Finding, Preflight, checks_of, product_error
from laststep.config.config import Config
from laststep.ranks.launchers import detect_world
from laststep.ranks.world import World
from laststep.rundir import RunDir

if TYPE_CHECKING:
    import torch

    from laststep.ranks.group import Group

MIB = 2**20
SIZES = tuple(mib * MIB for mib in (1, 4, 16, 64, 256))  # bytes of the buffers that are all-reduced
REPEATS = 5  # timed all-reduces of each size, after one that is not timed
# On CPUs, the larger sizes are left out once an all-reduce takes longer than this.
LONG_S = 2.0
PRODUCTS, EDGE = 10, 1024  # the compute test of a rank: this many products of EDGE x EDGE matrices


@dataclass(frozen=True)
class Greeting:
    """The message of one rank."""

    rank: int
    size: int
    host: str
    backend: str
    address: str  # of the store where the ranks met
    total: float  # the sum of a one from every rank
    work_s: float = 0.0  # seconds for the compute test, which all ranks run at the same time
    all_reduce_s: dict[int, list[float]] = field(default_factory=dict)  # bytes -> seconds of each repeat
    findings: list[Finding] = field(default_factory=list)  # of this rank's node, if it is the first there; of its GPU

    def __str__(self) -> str:
        return f"[{self.address}] hello from [{self.host}:{self.backend}] rank {self.rank}/{self.size}"


class Hello:
    """The function that each rank of doctor's job runs; `folder` belongs to this job, and all ranks can see it."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder

    def __call__(self) -> Greeting:
        """Meet the others, sum the ones, measure. Raises MeetingError, which names the ranks that did not arrive."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it; there is nothing to save here
        world = detect_world()
        sign_in(self.folder, world)
        preflight = Preflight(checks_of(self.config, world) if world.local_rank == 0 else [])
        # Imported after signing in: a rank whose import takes long, e.g. from a slow disk, has started all the same.
        from laststep.ranks.group import join

        group = join(self.config, world, RunDir(self.folder).meeting(world.attempt), timeout_s=0)
        group.connect(timeout_s=0)
        findings = [*preflight.findings(), *(Finding(skew, fatal=False) for skew in group.skewed_clocks)]
        if group.device.type == "cuda" and (error := product_error(group.device)):
            findings.append(Finding(f"{group.device}: {error}", fatal=True))
        greeting = replace(measure(group), findings=findings)
        print(greeting, flush=True)
        group.close()
        return greeting


def sign_in(folder: Path, world: World) -> None:
    """Record that this rank has started, and on which host."""
    (folder / f"started-{world.rank}").write_text(world.host_of(world.rank))


def signed_in(folder: Path) -> dict[int, str]:
    """The ranks that have started: rank -> host."""
    return {int(path.name.removeprefix("started-")): path.read_text() for path in folder.glob("started-*")}


def greet(group: Group) -> Greeting:
    """Sum the ones with all other ranks; returns this rank's greeting."""
    world = group.world
    return Greeting(
        rank=world.rank,
        size=world.size,
        host=world.host_of(world.rank),
        backend=group.backend if world.size > 1 else "alone",
        address=group.address or "no other ranks",
        total=_sum_of_ones(group),
    )


def measure(group: Group) -> Greeting:
    """`greet`, with this rank's measured times."""
    return replace(greet(group), work_s=_time_work(group), all_reduce_s=_time_all_reduces(group))


def gather_greetings(
    group: Group, greeting: Greeting, variables: dict[str, str]
) -> list[tuple[Greeting, dict[str, str]]]:
    """On rank 0: the greeting and the environment of every rank, in rank order. On the others: an empty list."""
    group.store.set(f"hello/{group.world.rank}", json.dumps([asdict(greeting), variables]))
    if group.world.rank:
        return []
    received = [json.loads(group.store.get(f"hello/{rank}")) for rank in range(group.world.size)]
    return [(Greeting(**greeting), variables) for greeting, variables in received]


def bus_bandwidth(size: int, ranks: int, seconds: float) -> float:
    """Bytes per second through the slowest link of an ideal all-reduce, which does not depend on the number of ranks:
    the bus bandwidth of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks * size / seconds


def all_reduce_times(greetings: Sequence[Greeting]) -> dict[int, float]:
    """Bytes -> seconds: the median of the repeats, where the slowest rank's time counts for each repeat."""
    times = [greeting.all_reduce_s for greeting in greetings]
    return {size: statistics.median(map(max, zip(*(of_rank[size] for of_rank in times)))) for size in times[0]}


def work_times(greetings: Sequence[Greeting]) -> dict[str, float]:
    """Host -> seconds that its slowest rank took for the compute test; the slowest host first."""
    slowest: dict[str, float] = {}
    for greeting in greetings:
        slowest[greeting.host] = max(greeting.work_s, slowest.get(greeting.host, 0.0))
    return dict(sorted(slowest.items(), key=lambda item: -item[1]))


def wrong_sums(greetings: Sequence[Greeting]) -> list[str]:
    """One line for each rank that has a wrong sum."""
    wrong = [greeting for greeting in greetings if greeting.total != greeting.size]
    return [f"rank {one.rank} on {one.host}: the sum of {one.size} ones is {one.total:g}" for one in wrong]


def bad_nodes(greetings: Sequence[Greeting]) -> list[str]:
    """One line for each reason why a node cannot train."""
    return [f"{one.host}: {found.text}" for one in greetings for found in one.findings if found.fatal]


def report(greetings: Sequence[Greeting]) -> list[str]:
    """The measurements of all ranks, as lines of text."""
    ranks = greetings[0].size
    lines = wrong_sums(greetings) or [f"sum of ones: {ranks} on every rank"]
    lines += [f"bad node {line}" for line in bad_nodes(greetings)]
    lines += [f"{one.host}: {found.text}" for one in greetings for found in one.findings if not found.fatal]
    times = all_reduce_times(greetings)
    if times:
        lines += ["", "all-reduce      time  bus bandwidth"]
        for size, seconds in times.items():
            bandwidth = bus_bandwidth(size, ranks, seconds)
            lines.append(f"{size // MIB:>6} MiB {1000 * seconds:>6.1f} ms {bandwidth / 1e9:>9.2f} GB/s")
        if len(times) < len(SIZES):
            lines.append(f"(larger sizes left out: this one took over {LONG_S:g} s)")
        lines.append(
            f"(bus bandwidth: 2(N-1)/N x bytes / time, as in nccl-tests; time: slowest rank, median of {REPEATS})"
        )
    work = work_times(greetings)
    median = statistics.median(work.values())
    lines += ["", "compute time of each host, slowest first"]
    lines += [f"{1000 * seconds:>8.0f} ms {seconds / median:>6.2f} x median  {host}" for host, seconds in work.items()]
    lines.append(f"({PRODUCTS} products of {EDGE} x {EDGE} matrices on all ranks at once, without the network;")
    lines.append(" each rank uses its own clock; the slowest rank of a host counts)")
    return lines


def _sum_of_ones(group: Group) -> float:
    import torch
    import torch.distributed as dist

    one = torch.ones(1, device=group.device)
    if group.world.size > 1:
        dist.all_reduce(one)
    return one.item()


def _time_work(group: Group) -> float:
    """Seconds for the compute test, which all ranks run at once, without communication."""
    import torch

    matrix = torch.rand(EDGE, EDGE, device=group.device) / EDGE
    matrix @ matrix  # not timed: the first product loads the library
    _barrier(group)
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        matrix = matrix @ matrix
    _synchronize(group.device)
    return time.perf_counter() - began


def _time_all_reduces(group: Group) -> dict[int, list[float]]:
    """Bytes -> seconds of each repeat."""
    times: dict[int, list[float]] = {}
    if group.world.size == 1:
        return times
    for size in SIZES:
        times[size] = _time_all_reduce(group, size)
        too_long = group.device.type == "cpu" and statistics.median(times[size]) > LONG_S
        if group.broadcast_bool(too_long):
            break
    return times


def _time_all_reduce(group: Group, size: int) -> list[float]:
    """Seconds of each repeat of an all-reduce of `size` bytes. Raises RuntimeError when a sum is wrong."""
    import torch
    import torch.distributed as dist

    buffer = torch.empty(size // 4, device=group.device)  # float32
    times = []
    for _ in range(1 + REPEATS):
        buffer.fill_(1)
        _barrier(group)
        began = time.perf_counter()
        dist.all_reduce(buffer)
        _synchronize(group.device)
        times.append(time.perf_counter() - began)
    if not bool((buffer == group.world.size).all()):
        raise RuntimeError(f"rank {group.world.rank}: an all-reduce of {size} bytes gave a wrong sum")
    return times[1:]


def _barrier(group: Group) -> None:
    """Wait until all ranks are here and their devices have finished their work."""
    import torch.distributed as dist

    if group.world.size > 1:
        dist.barrier()
    _synchronize(group.device)


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""hello: the ranks meet as in a run, say who they are, sum a one from each, and measure their speed together.

`launch.py doctor --nodes` runs it as a job, the roll call. `python -m laststep hello` runs it under any launcher,
without the speed measurement. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from submitit.core.utils import pickle_load

from laststep.attempt.preflight import Finding, Preflight, checks_of, product_error
from laststep.code import code_copy
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError
from laststep.ranks.disk import FreshView
from laststep.ranks.launchers import detect_world
from laststep.ranks.slurm import SlurmError, command
from laststep.ranks.world import World
from laststep.rundir import RunDir
from laststep.runs.queue import Queue
from laststep.submission import sbatch

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
            # Through the slowest link of an ideal all-reduce: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
            bandwidth = 2 * (ranks - 1) / ranks * size / seconds
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


LIMIT_MIN = 10  # time limit of the job
SIGNAL_S = 30  # the job is signalled this long before its limit: submitit requires a value, but no rank uses the signal
POLL_S = 0.2
QUEUE_POLL_S = 5.0  # the scheduler is shared by all users, so it is asked less often
# Once the other ranks have failed or finished, give up on a rank that has not even started after this long. The files
# of another node may take a while to become visible here.
GIVE_UP_S = 10.0


class RollCall:
    """The job, and the results of its ranks so far."""

    def __init__(self, config: Config) -> None:
        """Submit the job. Raises ConfigError when that fails, and then leaves nothing behind."""
        root = Path(os.path.expanduser(config.launch.root)).absolute()
        config = with_launch(config, root=str(root), time_min=LIMIT_MIN, signal_delay_s=SIGNAL_S)
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
        except OSError as error:
            raise ConfigError(f"launch.root={root}: cannot be written: {error.strerror}") from None
        run = RunDir(self.folder)
        try:
            code_copy.copy_code(run, config)  # as for every run, which tests that the nodes can see and import it
            executor = sbatch.job_executor(config, run, options={"no-requeue": True})
            executor.update_parameters(job_name="doctor")
            (self._job,) = sbatch.submit_jobs(executor, [Hello(config, self.folder)])
        except ConfigError:
            self.remove()
            raise
        self.job_id = str(self._job.job_id)
        self.size = config.launch.world_size  # number of ranks
        self.greetings: dict[int, Greeting] = {}  # by rank
        self.errors: dict[int, str] = {}  # by rank

    def wait(self, on_state: Callable[[str], None]) -> None:
        """Wait until every rank has a result, or no more results can be expected. Calls `on_state` with each new state
        of the job in the queue."""
        asked_at, state, job_ended = 0.0, "", False
        last_news_at = time.monotonic()
        view = FreshView(1, self.folder, RunDir(self.folder).logs)
        while self._pending():
            view.refresh()
            if self._read_results():
                last_news_at = time.monotonic()
            working = signed_in(self.folder).keys() & self._pending()
            overdue = time.monotonic() > last_news_at + GIVE_UP_S
            if overdue and (job_ended or ((self.greetings or self.errors) and not working)):
                return
            if not job_ended and time.monotonic() > asked_at + QUEUE_POLL_S:
                asked_at = time.monotonic()
                jobs = Queue.ask([RunDir(self.folder)]).jobs
                job = (jobs or {}).get(self.job_id)
                new_state = f"{job.state} {job.reason}".strip().lower() if job else state
                if new_state != state:
                    on_state(new_state)
                    state = new_state
                if jobs is not None and job is None:
                    job_ended, last_news_at = True, time.monotonic()
            time.sleep(POLL_S)

    def failures(self) -> list[str]:
        """One line for each rank that did not say hello, with the reason as far as it is known."""
        hosts = signed_in(self.folder)
        lines = []
        for rank in sorted(set(range(self.size)) - self.greetings.keys()):
            who = f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"
            if rank in self.errors:
                why = self.errors[rank]
            elif rank in hosts:
                why = "started, but was ended before it finished"
            else:
                why = f"did not start: its node cannot see {self.folder}, or Python does not start there"
            lines.append(f"{who}: {why}")
        return lines

    def cancel(self) -> None:
        """Cancel the job, if it has not ended yet."""
        with contextlib.suppress(SlurmError):
            command("scancel", self.job_id)

    def remove(self) -> None:
        """Remove the job's folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pending(self) -> set[int]:
        """The ranks that have no result yet."""
        return set(range(self.size)) - self.greetings.keys() - self.errors.keys()

    def _read_results(self) -> bool:
        """Read the results that ranks have written; returns whether there was a new one."""
        found = False
        for rank in self._pending():
            path = self._job.task(rank).paths.result_pickle
            # Not written yet or, on a network file system, not completely visible yet.
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                outcome, result = pickle_load(path)
                found = True
                if outcome == "success":
                    self.greetings[rank] = result
                else:
                    self.errors[rank] = str(result).strip().splitlines()[-1]
        return found

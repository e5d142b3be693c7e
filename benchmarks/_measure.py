"""Helpers shared by the benchmarks: machine description, statistics, and ranks started the way a job starts them."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from laststep.config.config import Config
from laststep.rundir import RunDir
from laststep.runs import run_folders

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
DEADLINE_S = 120.0
MET, MISSED, NOISE = "met", "missed", "within noise"


def machine(packages: Sequence[str] = ("torch", "submitit", "omegaconf")) -> dict[str, Any]:
    """The date, hardware and package versions that the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, 10th, 90th and 95th percentile, and maximum of at least two values, in the unit of the values."""
    twentieths = statistics.quantiles(values, n=20, method="inclusive")
    figures = {
        "median": statistics.median(values),
        "p10": twentieths[1],
        "p90": twentieths[-2],
        "p95": twentieths[-1],
        "max": max(values),
    }
    return {name: round(figure, digits) for name, figure in figures.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of at least 95 % for the median: from the kth smallest value to the kth largest (the sign
    test). Fewer than six values cannot give that: then it is from the smallest to the largest."""
    count, ordered = len(values), sorted(values)
    tails = (2 * sum(math.comb(count, i) for i in range(k)) / 2**count for k in range(1, count // 2 + 1))
    k = max(1, sum(tail <= 0.05 for tail in tails))
    return ordered[k - 1], ordered[-k]


@dataclass(frozen=True)
class Check:
    """A limit, and the repeated measurements whose median must keep it; or a single number."""

    what: str
    limit: float
    values: Sequence[float]
    unit: str = ""
    at_least: bool = False  # the limit is the lowest acceptable value, not the highest
    counts: bool = True  # whether a miss fails the benchmark

    def verdict(self) -> str:
        """MET or MISSED; NOISE if the limit lies within the confidence interval of the median."""
        low, high = interval(self.values)
        if self.at_least:
            return MET if low >= self.limit else MISSED if high < self.limit else NOISE
        return MET if high <= self.limit else MISSED if low > self.limit else NOISE

    def record(self) -> dict[str, Any]:
        """What results/NAME.json keeps of it."""
        figures = dict(zip(("median", "low", "high"), (statistics.median(self.values), *interval(self.values))))
        return {
            **{"what": self.what, "limit": self.limit, "unit": self.unit, "at_least": self.at_least},
            **{name: round(figure, 4) for name, figure in figures.items()},
            **{"counts": self.counts, "verdict": self.verdict()},
        }


def check_line(record: dict[str, Any]) -> str:
    """The line of a table for `Check.record`: limit, median and its interval, verdict, what was measured."""
    limit = f"{'>=' if record['at_least'] else '<='} {record['limit']:g}"
    spread = f"({record['low']:.4g} - {record['high']:.4g})" if record["low"] < record["high"] else ""
    verdict = record["verdict"] + ("" if record["counts"] else ", does not count")
    return f"{limit:>9}  {record['median']:>8.4g} {spread:<19} {record['unit']:<3} {verdict:<13} {record['what']}"


CHECK_TITLES = f"{'limit':>9}  {'median':>8} {'(95 %)':<19} {'':<3} {'verdict':<13}"


def conclude(name: str, results: dict[str, Any], checks: Sequence[Check]) -> int:
    """Print the verdict on each limit and write the results; returns the exit status: 1 if a limit that counts is
    missed. One that is within the noise is not."""
    records = [check.record() for check in checks]
    print(CHECK_TITLES)
    for record in records:
        print(check_line(record))
    write_results(name, {**results, "checks": records})
    return int(any(record["verdict"] == MISSED and record["counts"] for record in records))


def write_results(name: str, results: dict[str, Any]) -> None:
    """Write results/NAME.json: the machine description, then the figures."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({**machine(), **results}, indent=1) + "\n")


def new_run(root: Path, *words: str) -> RunDir:
    """Create a run folder for two ranks on this machine, configured by `key=value` words. Starts nothing."""
    config = Config.load("mnist", ["launch.tasks_per_node=2", f"launch.root={root}", *words])
    return run_folders.create(run_folders.with_root_and_name(config, stem="benchmark"))


class Ranks:
    """The two ranks of one attempt: fresh interpreters with the environment variables that a submitit job would set."""

    _attempts = iter(range(1, 1 << 30))

    def __init__(self, run: RunDir) -> None:
        job = f"attempt{next(self._attempts):04}"
        self.logs = [run.logs / f"{job}_{rank}_log.out" for rank in range(2)]
        place = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": job,
            "SUBMITIT_LOCAL_NTASKS": "2",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
        }
        self.started = time.time()
        self.processes = []
        for rank, log in enumerate(self.logs):
            identity = {**place, "SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)}
            self.processes.append(start([sys.executable, "-u", "-m", "laststep", str(run.path)], identity, log))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for the condition; `what` names its failure. Raises TimeoutError, or RuntimeError if rank 0 exits first,
        with the ranks' logs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {DEADLINE_S:.0f} s:\n{self.output()}")
            if self.processes[0].poll() is not None and not condition():
                raise RuntimeError(f"{what}, but rank 0 ended:\n{self.output()}")
            time.sleep(0.005)

    def signal(self, number: signal.Signals, rank: int) -> float:
        """Send a signal to one rank; returns the time of sending, in Unix seconds."""
        now = time.time()
        self.processes[rank].send_signal(number)
        return now

    def wait(self) -> float:
        """Wait until all ranks have exited; returns the time of the last exit, in Unix seconds.

        Raises TimeoutError, with the ranks' logs.
        """
        try:
            for process in self.processes:
                process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the ranks did not end:\n{self.output()}") from None
        finally:
            self.kill()
        return time.time()

    def kill(self) -> None:
        """Kill the ranks that are still running."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def output(self) -> str:
        """The logs of both ranks."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)


def start(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in the project folder, limited to one compute thread since two ranks share a small machine."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@contextlib.contextmanager
def ended(ranks: Ranks) -> Iterator[Ranks]:
    """Kill the ranks on exit, so that none outlives a benchmark that fails."""
    try:
        yield ranks
    finally:
        ranks.kill()

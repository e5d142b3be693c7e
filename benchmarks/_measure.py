"""What the benchmarks share: the machine and the spread of figures, and ranks of a run as a job would start them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.cluster import run_folders
from trainer.config.config import Config
from trainer.rundir import RunDir

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
DEADLINE_S = 120.0


def machine(packages: Sequence[str] = ("torch", "submitit", "omegaconf")) -> dict[str, Any]:
    """What the figures depend on."""
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
    """Median, 10th, 90th and 95th percentile, and largest of at least two figures, in their own unit."""
    twentieths = statistics.quantiles(values, n=20, method="inclusive")
    figures = {
        "median": statistics.median(values),
        "p10": twentieths[1],
        "p90": twentieths[-2],
        "p95": twentieths[-1],
        "max": max(values),
    }
    return {name: round(figure, digits) for name, figure in figures.items()}


def write_results(name: str, results: dict[str, Any]) -> None:
    """Write results/NAME.json: the machine, then the figures."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({**machine(), **results}, indent=1) + "\n")


def new_run(root: Path, *words: str) -> RunDir:
    """A run folder for two ranks on this machine, configured by `key=value` words; nothing is started."""
    config = Config.load("mnist", ["launch.tasks_per_node=2", f"launch.root={root}", *words])
    return run_folders.create(run_folders.with_root_and_name(config, stem="benchmark"))


class Ranks:
    """The two ranks of one attempt at a run: fresh interpreters, told who they are as submitit's job tells them."""

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
            who = {**place, "SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)}
            self.processes.append(start([sys.executable, "-u", "-m", "trainer", str(run.path)], who, log))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for it. Raises TimeoutError or RuntimeError, with the ranks' logs, when it does not happen."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {DEADLINE_S:.0f} s:\n{self.output()}")
            if self.processes[0].poll() is not None and not condition():
                raise RuntimeError(f"{what}, but rank 0 ended:\n{self.output()}")
            time.sleep(0.005)

    def signal(self, number: signal.Signals, rank: int) -> float:
        """Send a signal to one rank; returns when, in Unix seconds."""
        now = time.time()
        self.processes[rank].send_signal(number)
        return now

    def wait(self) -> float:
        """Until all have exited; returns when the last did, in Unix seconds. Raises TimeoutError with their logs."""
        try:
            for process in self.processes:
                process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the ranks did not end:\n{self.output()}") from None
        finally:
            self.kill()
        return time.time()

    def kill(self) -> None:
        """End what still lives."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def output(self) -> str:
        """What both printed."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)


def start(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in the project's folder with one thread for arithmetic: two ranks share a small machine."""
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
    """No rank outlives the benchmark, whatever goes wrong in it."""
    try:
        yield ranks
    finally:
        ranks.kill()

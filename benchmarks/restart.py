"""The time from a fault to the first new step, without a requeue, by phase; beside its floor and beside a requeue.

`python -m benchmarks.restart [--rounds N]`. The run of the tests (the small network on mnist-5k) trains on two nodes of
a throwaway Slurm, two ranks on each, all on this machine. Again and again a rank is killed with SIGKILL, or frozen with
SIGSTOP: then the time counts from the moment at which `launch.hang_timeout_s` is over. The floor is the least that a
start of new processes costs: srun, four interpreters that import torch, meet, and read the bytes of the checkpoint. A
requeue is the same fault with launch.max_restarts=0; it includes some 6 s for which Slurm holds a requeued job.

A restart must take at most 3 s, and at most 1.2 times its floor; if a median misses that by more than the noise, the
exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._measure import PROJECT, Check, conclude
from benchmarks.requeue import FLOOR, SAID, by_phase
from laststep.data.catalog import MNIST_5K
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.slurm.cluster import Cluster
from tests.slurm.processes import parent, processes

LIMIT_S, LIMIT = 3.0, 1.2  # times the floor's median
HANG_TIMEOUT_S = 3
DEADLINE_S = 120.0
POLL_S = 0.01
# Files whose first appearance ends a phase: from the fault on, in this order.
SIGNS = {"noticed": "rescue/*/leader_0.json", "rank gone": "rescue/*/gone_3"}
FAULTS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}


class Training:
    """One run on the cluster, which is hit again and again."""

    def __init__(self, cluster: Cluster, root: Path, name: str, *words: str) -> None:
        self.cluster, self.run, self.name = cluster, RunDir(root / name), name
        self.env = {**cluster.env, "OMP_NUM_THREADS": "1", "LASTSTEP_SITE": str(root / "site.yaml")}
        (root / "site.yaml").write_text("{}\n")
        options = ("train.epochs=1000", "train.log_every=1", f"launch.root={root}", *words)
        size = ("--nodes", "2", "--tasks-per-node", "2", "--name", name)
        self._launch("submit", "--config", "mnist", *size, *options)
        self.until(lambda: len(self.steps()) > 20, "no step")

    def _launch(self, *words: str) -> None:
        command = [sys.executable, "launch.py", *words]
        subprocess.run(command, cwd=PROJECT, env=self.env, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)

    def until(self, condition: object, what: str) -> None:
        """Wait for the condition. Raises TimeoutError with `what`."""
        self.cluster.wait_for(condition, DEADLINE_S, f"{self.name}: {what}", POLL_S)  # type: ignore[arg-type]

    def steps(self) -> list[float]:
        """The time of each line of metrics.jsonl."""
        return [line["time"] for line in read_lines(self.run.metrics) if "loss" in line]

    def ranks(self) -> dict[int, int]:
        """The pid of each rank: the child of its supervisor."""
        found = {
            pid: int(environ["SLURM_PROCID"])
            for pid, command, environ in processes()
            if "submitit.core._submit" in command and str(self.run.logs) in command and "SLURM_PROCID" in environ
        }
        return {rank: pid for pid, rank in found.items() if parent(pid) in found}

    def hit(self, number: signal.Signals) -> dict[str, float]:
        """Send rank 3 this signal; returns seconds by phase until the first new step."""
        self.until(lambda: len(self.ranks()) == 4, "the ranks do not run")
        attempts = len(read_lines(self.run.attempts))
        seen = dict.fromkeys(SIGNS, 0.0)
        with _watching(self.run, seen):
            began = time.time()
            os.kill(self.ranks()[3], number)
            self.until(lambda: len(read_lines(self.run.attempts)) > attempts, "the attempt did not end")
            ended = read_lines(self.run.attempts)[-1]
            self.until(lambda: any(at > ended["end"] for at in self.steps()), "no new step")
        first = next(at for at in self.steps() if at > ended["end"])
        began += HANG_TIMEOUT_S if number == signal.SIGSTOP else 0
        said = SAID.findall((self.run.logs / f"{ended['job_id']}_0_log.out").read_text())[-1]
        phases = dict((part.rpartition(" ")[0], float(part.rpartition(" ")[2])) for part in said.split(", "))
        times, before = {}, began
        for name, at in {
            **seen,
            "last step saved": ended["end"],
            "ranks started": first - sum(phases.values()),
        }.items():
            times[name], before = at - before, at
        return {**times, **phases, "in all": first - began}

    def end(self) -> None:
        """Cancel the run."""
        self.cluster.run("scancel", "--name", self.name, check=False)
        self.cluster.wait_for(lambda: not self.cluster.run("squeue", "-h"), DEADLINE_S, "the job does not end")


@contextlib.contextmanager
def _watching(run: RunDir, seen: dict[str, float]) -> Iterator[None]:
    """Note when each of SIGNS appears."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(POLL_S):
            for name, pattern in SIGNS.items():
                if not seen[name] and any(run.path.glob(pattern)):
                    seen[name] = time.time()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def floor(training: Training) -> dict[str, float]:
    """Start four new processes that do only what none can do without; returns seconds by phase, of the slowest."""
    newest = max(training.run.checkpoints.glob("step_*"))
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    script = f"import os; os.environ.update(RANK=os.environ['SLURM_PROCID'], WORLD_SIZE='4')\n{FLOOR}"
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    words = ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", sys.executable, "-c", script, str(MNIST_5K)]
    began = time.time()
    done = subprocess.run(
        [*words, *map(str, newest.iterdir())],
        env={**training.env, **meeting},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    times = max(map(json.loads, done.stdout.splitlines()), key=lambda found: float(found["first batch"]))
    starts = [began, *times.values()]
    phases = {phase: end - begin for phase, begin, end in zip(times, starts, times.values())}
    return {"srun and python": phases.pop("python"), **phases, "in all": times["first batch"] - began}


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, write the results; returns 1 if a restart takes too long."""
    parser = argparse.ArgumentParser(prog="benchmarks.restart", description="From a fault to the first new step.")
    parser.add_argument("--rounds", type=int, default=3, help="faults of each kind (default: 3)")
    rounds = parser.parse_args(words).rounds
    if rounds < 2:
        parser.error("--rounds must be at least 2")
    load = round(os.getloadavg()[0], 1)
    figures: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster.start(Path(folder) / "slurm", accounting=False)
        try:
            options = ("launch.max_restarts=1000", f"launch.hang_timeout_s={HANG_TIMEOUT_S}")
            training = Training(cluster, Path(folder), "restarts", *options)
            for _ in range(rounds):
                for name, number in FAULTS.items():
                    figures.setdefault(name, []).append(training.hit(number))
            training.end()
            figures["floor"] = [floor(training) for _ in range(rounds)]
            training = Training(cluster, Path(folder), "requeues", "launch.max_restarts=0")
            figures["requeue"] = [training.hit(signal.SIGKILL) for _ in range(2)]
            training.end()
        finally:
            cluster.stop()
    medians = {name: statistics.median(found["in all"] for found in each) for name, each in figures.items()}
    for name, each in figures.items():
        print(f"{name}: {medians[name]:.2f} s (medians of {len(each)})")
        for phase, s in by_phase(each).items():
            print(f"  {s['median']:>6.2f} s  {s['p10']:>5.2f} - {s['p90']:.2f} s  {phase}")
    checks = []
    for name in FAULTS:
        seconds = [found["in all"] for found in figures[name]]
        checks += [
            Check(f"restart, {name}", LIMIT_S, seconds, "s"),
            Check(f"restart, {name} / floor", LIMIT, [taken / medians["floor"] for taken in seconds]),
        ]
    results = {"load_before": load, "rounds": rounds, "unit": "s"}
    return conclude("restart", results | {name: by_phase(each) for name, each in figures.items()}, checks)


if __name__ == "__main__":
    sys.exit(main())

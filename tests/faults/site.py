"""Where the runs under faults live: a throwaway Slurm with partitions and times other than those of the tests."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import SLURM_CONF, Cluster
from tests.support.project import PROJECT

NODES = tuple(f"f{number}" for number in range(1, 9))
MOST_AT_ONCE = len(NODES) // 2  # a pair of nodes for each run: what hits one run leaves the others alone
KILL_WAIT_S, NOTICE_S, CANCEL_NOTICE_S, SLURMD_TIMEOUT_S = 10, 20, 12, 10
BATCH, NOTICE, SCAVENGE, URGENT = "batch", "notice", "scavenge", "urgent"
PARTITIONS = f"""\
PartitionName={BATCH} Nodes=ALL Default=YES PriorityTier=1
PartitionName={NOTICE} Nodes=ALL PriorityTier=1 GraceTime={NOTICE_S}
PartitionName={SCAVENGE} Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={CANCEL_NOTICE_S}
PartitionName={URGENT} Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
LOOK_S = 0.3  # between two looks at the queue
COMMAND_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Job:
    """A job in the queue."""

    name: str
    job_id: str
    state: str
    nodes: str


class Site:
    """A cluster, its users' command, and compiled and mounted things that faults need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.turn = Turn()
        self.lacks: dict[str, str] = {}  # what this machine cannot do, and why: no run then has it
        self._mounted: set[Path] = set()
        conf = re.sub(r"^PartitionName=.*\n", "", SLURM_CONF, flags=re.MULTILINE)
        conf = re.sub(r"^SlurmdTimeout=.*$", f"SlurmdTimeout={SLURMD_TIMEOUT_S}", conf, flags=re.MULTILINE)
        self.cluster = Cluster.start(
            folder / "slurm", kill_wait_s=KILL_WAIT_S, nodes=NODES, slurm_conf=conf + PARTITIONS
        )
        self._looking = threading.Lock()
        self._looked_at, self._jobs = 0.0, list[Job]()
        self.clock: Path | None = None
        try:
            self.clock = compile_clock(folder)
        except OSError as error:
            self.lacks["clock"] = f"no run has a clock of its own: {error}"
        try:
            self.mount(folder / "try", megabytes=1)
            self.unmount(folder / "try")
        except OSError as error:
            self.lacks["disk"] = f"a small disk cannot be mounted: {error}"

    def close(self) -> None:
        """End the cluster, and take away the disks."""
        self.cluster.stop()
        for folder in list(self._mounted):
            self.unmount(folder)

    def launch(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`python launch.py WORDS`, as a user of this cluster types it."""
        variables = {**self.cluster.env, "OMP_NUM_THREADS": "1", **(env or {})}
        return subprocess.run(
            [sys.executable, "launch.py", *words],
            cwd=PROJECT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
        )

    def jobs(self, name: str) -> list[Job]:
        """Jobs of that name that wait, run or end. As of at most `LOOK_S` ago: one look serves all runs."""
        with self._looking:
            if time.monotonic() > self._looked_at + LOOK_S:
                # While the controller is away the last answer stands.
                with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                    lines = self.cluster.run("squeue", "-h", "-o", "%j|%i|%T|%N").splitlines()
                    self._jobs = [Job(*line.split("|")) for line in lines]
                self._looked_at = time.monotonic()
            return [job for job in self._jobs if job.name == name]

    def pair(self, slot: int) -> tuple[str, str]:
        """The nodes of one slot."""
        return NODES[2 * slot], NODES[2 * slot + 1]

    def mount(self, folder: Path, megabytes: int) -> None:
        """A small disk. Raises OSError where this process may not mount."""
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())
        self._mounted.add(folder)

    def unmount(self, folder: Path) -> None:
        """The disk and what is on it are gone."""
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)
        self._mounted.remove(folder)
        folder.rmdir()


def compile_clock(folder: Path) -> Path:
    """The library in `folder` that moves the clock of who preloads it. Raises OSError without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler")
    library, source = folder / "clock.so", Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


class Turn:
    """Many faults at once, or one alone: a controller that is away is everybody's affair."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing, self._waiting, self._alone = 0, 0, False

    @contextlib.contextmanager
    def take(self, alone: bool) -> Iterator[None]:
        """Wait until nobody else is at it (`alone`), or until nobody is or wants to be alone."""
        with self._changed:
            if alone:
                self._waiting += 1
                self._changed.wait_for(lambda: not self._sharing and not self._alone)
                self._waiting -= 1
                self._alone = True
            else:
                self._changed.wait_for(lambda: not self._waiting and not self._alone)
                self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                if alone:
                    self._alone = False
                else:
                    self._sharing -= 1
                self._changed.notify_all()

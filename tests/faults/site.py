"""The throwaway Slurm of a run under faults, with partitions and timeouts of its own."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import SLURM_CONF, Cluster
from tests.support.project import PROJECT, SILENT_PATH

NODES = ("f1", "f2", "f3")
SPARE = NODES[2]  # used by runs with a spare node only
KILL_WAIT_S, NOTICE_S, CANCEL_NOTICE_S, SLURMD_TIMEOUT_S = 10, 20, 12, 10
BATCH, NOTICE, SCAVENGE, URGENT = "batch", "notice", "scavenge", "urgent"
PARTITIONS = f"""\
PartitionName={BATCH} Nodes=ALL Default=YES PriorityTier=1
PartitionName={NOTICE} Nodes=ALL PriorityTier=1 GraceTime={NOTICE_S}
PartitionName={SCAVENGE} Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={CANCEL_NOTICE_S}
PartitionName={URGENT} Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
LOOK_S = 0.3  # how old a cached answer of squeue may be
COMMAND_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Job:
    """A job in the queue."""

    name: str
    job_id: str
    state: str
    nodes: str


class Site:
    """A cluster, the launch.py command, and the file systems and the clock library that faults need.

    Runs at the same time have a site each, so that a fault of slurmctld or of a node affects one run. The first cluster
    has accounting, the others have none, as there are both.
    """

    def __init__(self, folder: Path, accounting: bool = True, silent: bool = False) -> None:
        self.folder = folder
        # The ranks' collectives are silent when a peer dies, see tests/silent/silent_backend.py.
        self.env = {"PYTHONPATH": SILENT_PATH} if silent else {}
        self.lacks: dict[str, str] = {}  # what this machine cannot provide to runs, and why
        self._mounted: set[Path] = set()
        conf = re.sub(r"^PartitionName=.*\n", "", SLURM_CONF, flags=re.MULTILINE)
        conf = re.sub(r"^SlurmdTimeout=.*$", f"SlurmdTimeout={SLURMD_TIMEOUT_S}", conf, flags=re.MULTILINE)
        self.cluster = Cluster.start(
            folder / "slurm",
            kill_wait_s=KILL_WAIT_S,
            nodes=NODES,
            slurm_conf=conf + PARTITIONS,
            accounting=accounting,
        )
        self._looking = threading.Lock()
        self._looked_at, self._jobs = 0.0, list[Job]()
        self.clock: Path | None = None
        self.forks: Path | None = None
        try:
            self.clock, self.forks = compile_library(folder, "clock"), compile_library(folder, "forks")
        except OSError as error:
            self.lacks["clock"] = f"no run has a clock or a limit of processes of its own: {error}"
        try:
            self.mount(folder / "try", megabytes=1)
            self.unmount(folder / "try")
        except OSError as error:
            self.lacks["disk"] = f"a small file system cannot be mounted: {error}"

    def close(self) -> None:
        """Stop the cluster and unmount the disks."""
        self.cluster.stop()
        for folder in list(self._mounted):
            self.unmount(folder)

    def launch(
        self, *words: str, env: dict[str, str] | None = None, gives_up: Callable[[], bool] = lambda: False
    ) -> subprocess.CompletedProcess[str]:
        """Run `python launch.py WORDS` as a user of this cluster. Raises subprocess.TimeoutExpired at the deadline, or
        once it `gives_up`; the command has been killed then."""
        variables = {**self.cluster.env, **self.env, "OMP_NUM_THREADS": "1", **(env or {})}
        command, pipe = [sys.executable, "launch.py", *words], subprocess.PIPE
        deadline = time.monotonic() + COMMAND_DEADLINE_S
        with subprocess.Popen(command, cwd=PROJECT, env=variables, stdout=pipe, stderr=pipe, text=True) as child:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = child.communicate(timeout=LOOK_S)
                    return subprocess.CompletedProcess(command, child.returncode, out, err)
                if gives_up() or time.monotonic() > deadline:
                    child.kill()
                    raise subprocess.TimeoutExpired(command, COMMAND_DEADLINE_S)

    def jobs(self, name: str) -> list[Job]:
        """Jobs with this name in the queue, as of at most `LOOK_S` ago."""
        with self._looking:
            if time.monotonic() > self._looked_at + LOOK_S:
                # While slurmctld is away, the last answer is kept.
                with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                    lines = self.cluster.run("squeue", "-h", "-o", "%j|%i|%T|%N").splitlines()
                    self._jobs = [Job(*line.split("|")) for line in lines]
                self._looked_at = time.monotonic()
            return [job for job in self._jobs if job.name == name]

    def mount(self, folder: Path, megabytes: int) -> None:
        """Mount a small file system. Raises OSError if this process may not mount."""
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())
        self._mounted.add(folder)

    def unmount(self, folder: Path) -> None:
        """Unmount the file system and drop what is on it."""
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)
        self._mounted.remove(folder)
        folder.rmdir()


def compile_library(folder: Path, name: str) -> Path:
    """Compile a library that processes preload: `clock` shifts their clock, `forks` limits their number. Raises OSError
    without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler")
    library, source = folder / f"{name}.so", Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library

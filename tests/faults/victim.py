"""A run as the faults see it: its processes, its job, its log, its checkpoints, and a trace of the batches it did."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from laststep.records.attempts import read_answer
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.faults.checks import Attempt
from tests.faults.plan import Setting, Shape
from tests.faults.site import NODES, Job, Site
from tests.faults.task import ASIDE, TRAINED, VALIDATED

T = TypeVar("T")
POLL_S = 0.05
BOOTED = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # Unix time
FOREIGN_S = 10.0  # within which a process begins the program for which it was forked
CLOCK_TICK_S = 0.05  # the times of processes are exact to a tick
# Log lines that show what the run is doing; "resume" and "skip" are also compared with the run's files.
MARKS = {
    "resume": re.compile(r"\[laststep[^]]*\] (?:resuming after step (\d+)|starting)"),
    "step": re.compile(r"\[laststep[^]]*\] step (\d+)/"),
    "stop": re.compile(r"\[laststep[^]]*\] .*stopping"),
    "skip": re.compile(r"\[laststep[^]]*\] .*skipped step_(\d+): ."),  # followed by the reason
}
STARTS_S = 20.0  # within which a rank is there, on a busy machine


class Missed(Exception):
    """The target of a fault is gone."""


class NeverCame(Exception):
    """A condition was not met before its deadline."""


@dataclass(frozen=True)
class Process:
    """A process of the run, rank or not."""

    pid: int
    parent: int
    argv: tuple[str, ...]
    env: dict[str, str]
    began: float  # Unix time
    again: int = 0  # restarts within its step before it began

    @property
    def attempt(self) -> Attempt:
        """The attempt that it belongs to."""
        restart, step = (int(self.env.get(name, 0)) for name in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
        return Attempt(self.env.get("SLURM_JOB_ID", "none"), restart, step, self.again)

    @property
    def trains(self) -> bool:
        """Whether it is a rank, its supervisor, or a worker that a rank forked."""
        return "submitit.core._submit" in self.argv and "python" in os.path.basename(self.argv[0])


@dataclass(frozen=True)
class Event:
    """A line of rank 0's log of one of the kinds in MARKS, and when it was seen."""

    time: float
    kind: str
    number: int


@dataclass
class Log:
    """The log of rank 0, over all jobs of the run."""

    folder: Path
    events: list[Event] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> None:
        """Read the new lines."""
        for path in sorted(self.folder.glob("*_0_log.out")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
                self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
                for line in whole.decode(errors="replace").splitlines():
                    for kind, words in MARKS.items():
                        if found := words.match(line):
                            number = found.group(1) if words.groups else None
                            self.events.append(Event(time.monotonic(), kind, int(number or 0)))

    def last(self, kind: str) -> Event | None:
        """The newest event of a kind."""
        return next((event for event in reversed(self.events) if event.kind == kind), None)


class Victim:
    """One run under faults."""

    def __init__(self, site: Site, run: RunDir, aside: Path, setting: Setting) -> None:
        self.site = site
        self.run = run
        self.aside = aside
        self.setting = setting
        self.log = Log(run.logs)
        self.clock = aside / "clock"
        self.own: set[str] = set()  # the `identity` of each checkpoint that the harness damaged
        self._later: list[threading.Timer] = []
        self._foreign: dict[str, float] = {}
        aside.mkdir(parents=True)
        self.forks = aside / "forks"
        self.total = 0  # steps of the run
        for clock in self._clocks():
            clock.write_bytes(bytes(8))
        self.forks.write_bytes(bytes(16))
        self.set_pace(0)

    def set_pace(self, milliseconds: int) -> None:
        """Set the least time per batch."""
        temporary = self.aside / "pace.tmp"
        temporary.write_text(str(milliseconds))
        temporary.replace(self.aside / "pace")

    def set_clock(self, seconds: int, node: str | None = None) -> None:
        """Set the error of the ranks' wall clock, of those on one node if given."""
        for clock in self._clocks() if node is None else [self.clock.with_name(f"clock.{node}")]:
            with clock.open("r+b") as file:
                file.write(struct.pack("q", seconds))

    def _clocks(self) -> list[Path]:
        return [self.clock, *(self.clock.with_name(f"clock.{node}") for node in NODES)]

    def stop_forks(self, seconds: float, threads: bool = False) -> None:
        """For so long the kernel has no process for this run, nor a thread."""
        until = time.monotonic_ns() + round(1e9 * seconds)
        with self.forks.open("r+b") as file:
            file.write(struct.pack("qq", until, until if threads else 0))

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Call `act` after this time, in a thread of its own."""
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()
        self._later.append(timer)

    def settle(self) -> None:
        """Wait until all calls of `later` are done."""
        while self._later:
            self._later.pop().join()

    # --- the job

    @property
    def jobs(self) -> list[Job]:
        """Its jobs in the queue, running ones first."""
        return sorted(self.site.jobs(self.run.name), key=lambda job: (job.state == "PENDING", job.job_id))

    @property
    def job(self) -> Job:
        """Its running job, or else its pending one. Raises Missed if there is none."""
        for job in self.jobs:
            return job
        raise Missed("no job in the queue")

    def slurm(self, *words: str) -> str:
        """The output of a Slurm command. Raises Missed if Slurm refuses, as the job's state has changed."""
        try:
            return self.site.cluster.run(*words)
        except RuntimeError as error:
            raise Missed(str(error)) from None

    # --- the processes

    def processes(self) -> list[Process]:
        """All processes of the run: ranks, loader workers, srun, the batch script, and what they left running."""
        marks = (f"{ASIDE}={self.aside}\0".encode(), f"SLURM_JOB_NAME={self.run.name}\0".encode())
        conf = f"SLURM_CONF={self.site.cluster.conf}\0".encode()
        found = [
            p
            for p in _processes(marks, f"{self.run.path}/".encode(), self._foreign)
            if _mine(p, conf) and p.pid != os.getpid()
        ]
        return [replace(process, again=self._restarts_before(process)) for process in found]

    def _restarts_before(self, process: Process) -> int:
        """How often the ranks had been started again in the process's step when it began."""
        with contextlib.suppress(OSError):
            answer, answered_at = read_answer(self.run.step_restart), self.run.step_restart.stat().st_mtime
            if answer and answer.again and process.trains:
                before = Attempt.named(answer.after)
                if replace(before, again=0) == process.attempt:
                    return before.again + (process.began > answered_at - CLOCK_TICK_S)
        return 0

    def supervisors(self) -> dict[int, Process]:
        """The supervisors of the ranks, by number."""
        training = {p.pid: p for p in self.processes() if p.trains and "SLURM_PROCID" in p.env}
        return {int(p.env["SLURM_PROCID"]): p for p in training.values() if p.parent not in training}

    def ranks(self) -> dict[int, Process]:
        """The running ranks, by number: each is the child of its supervisor."""
        found = {p.pid: p for p in self.processes() if p.trains and "SLURM_PROCID" in p.env}
        supervisors = {p.pid for p in found.values() if p.parent not in found}
        return {int(p.env["SLURM_PROCID"]): p for p in found.values() if p.parent in supervisors}

    def pick(self, aim: float) -> int:
        """A rank's number, from `aim` in [0, 1)."""
        return int(aim * self.setting.world_size)

    def rank(self, number: int) -> Process:
        """A running rank. Raises Missed if there is none with this number."""
        with contextlib.suppress(NeverCame):  # srun may be starting them, or a supervisor importing torch
            return self.wait(lambda: self.ranks().get(number), STARTS_S, f"no rank {number}")
        raise Missed(f"rank {number} is not running")

    def all_ranks(self) -> list[Process]:
        """Every rank. Raises Missed if one is not running."""
        with contextlib.suppress(NeverCame):
            self.wait(lambda: len(self.ranks()) == self.setting.world_size, 2, "ranks are missing")
            return list(self.ranks().values())
        raise Missed("not all ranks are running")

    def node(self, aim: float) -> str:
        """A node that a rank runs on, from `aim` in [0, 1). Raises Missed if no rank is running."""
        nodes = sorted({rank.env["SLURMD_NODENAME"] for rank in self.ranks().values()})
        if not nodes:
            raise Missed("no rank is running")
        return nodes[int(aim * len(nodes))]

    def on_node(self, node: str) -> list[int]:
        """All processes of the run on one node, and the slurmstepd that started them."""
        found = [p for p in self.processes() if p.env.get("SLURMD_NODENAME") == node]
        return sorted({p.pid for p in found} | {p.parent for p in found if _command(p.parent) == "slurmstepd"})

    def workers(self) -> list[Process]:
        """The loader workers."""
        ranks = {rank.pid for rank in self.ranks().values()}
        return [p for p in self.processes() if p.trains and p.parent in ranks]

    def signal(self, number: signal.Signals, *pids: int) -> None:
        """Send a signal to these processes. Raises Missed if all of them have ended."""
        hit = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                hit += 1
        if not hit:
            raise Missed("the process has ended")

    # --- its work

    def traces(self) -> dict[Attempt, int]:
        """The number of training steps that each attempt has begun on any rank, without the warm-up."""
        batches: dict[Attempt, list[int]] = {}
        for path in self.aside.glob("*.trace"):
            batches.setdefault(Attempt.named(path.name.split(".")[0]), []).append(path.read_bytes().count(TRAINED) - 1)
        shares = self.setting.world_size if self.setting.shape is Shape.RANGE else 0  # each is a batch
        return {attempt: -(-max(0, *found) // max(1, shares // len(found))) for attempt, found in batches.items()}

    def records(self) -> list[dict[str, Any]]:
        """The lines of attempts.jsonl."""
        return read_lines(self.run.attempts)

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return any(record["reason"] == "finished" for record in self.records())

    def checkpoints(self) -> list[Path]:
        """Its checkpoints, oldest first, including damaged ones."""
        return sorted(path for path in self.run.checkpoints.glob("step_*") if path.name[5:].isdigit())

    def kept(self) -> int:
        """The step of the newest checkpoint that the harness has not damaged."""
        whole = [path for path in self.checkpoints() if identity(path) not in self.own]
        return max((int(path.name[5:]) for path in whole), default=0)

    def spoiled(self) -> set[int]:
        """Steps of the checkpoints that the harness damaged and that still exist."""
        return {int(path.name[5:]) for path in self.checkpoints() if identity(path) in self.own}

    def writing(self) -> bool:
        """Whether a checkpoint is being written: there is a folder beside the committed ones."""
        with contextlib.suppress(FileNotFoundError):
            return any(not re.fullmatch(r"step_\d+", name) for name in os.listdir(self.run.checkpoints))
        return False

    def validates(self) -> bool:
        """Whether the newest batch that a rank began is for validation."""
        with contextlib.suppress(OSError, ValueError):
            newest = max(self.aside.glob("*.trace"), key=lambda path: path.stat().st_mtime_ns)
            return newest.read_bytes().endswith(VALIDATED)
        return False

    def wait(self, condition: Callable[[], T | None], deadline_s: float, what: str, poll_s: float = POLL_S) -> T:
        """Poll until `condition` returns something true. Raises NeverCame at the deadline."""
        deadline = time.monotonic() + deadline_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise NeverCame(f"{what} (waited {deadline_s:.0f} s)")
            time.sleep(poll_s)
            self.log.poll()
        return value


def identity(path: Path) -> str:
    """A string that differs between a folder and one of the same name that is written later."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return f"{path.name} {stat.st_ino} {stat.st_mtime_ns}"
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _mine(process: Process, conf: bytes) -> bool:
    """Whether the process is not of a run with the same name on another cluster."""
    return "SLURM_CONF" not in process.env or f"SLURM_CONF={process.env['SLURM_CONF']}\0".encode() == conf


def _processes(marks: tuple[bytes, ...], word: bytes, foreign: dict[str, float]) -> Iterator[Process]:
    """Processes with one of `marks` in their environment or `word` in their command line. `foreign` keeps the others,
    and since when they are known: to look again at all of them each time takes more than the rest of the harness."""
    now = time.monotonic()
    present = [name for name in os.listdir("/proc") if name.isdecimal()]
    for gone in foreign.keys() - present:
        foreign.pop(gone)
    for entry in (Path("/proc", name) for name in present if now < foreign.get(name, now) + FOREIGN_S):
        with contextlib.suppress(OSError, ValueError, IndexError):
            environ, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            if not command or not (word in command or any(mark in environ for mark in marks)):
                foreign.setdefault(entry.name, now)
                continue
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parent, began = int(stat[1]), int(stat[19]) / os.sysconf("SC_CLK_TCK") + BOOTED
            argv = tuple(command.decode(errors="replace").split("\0"))
            pairs = (pair.partition("=") for pair in environ.decode(errors="replace").split("\0"))
            yield Process(int(entry.name), parent, argv, {key: value for key, _, value in pairs}, began)

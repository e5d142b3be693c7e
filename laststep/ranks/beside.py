"""Programs that run beside the training, such as what sends to a tracker: they never slow, end or change the run.

A `Program` is a process of its own: in its own session, without a descriptor of the rank's, at the lowest priority,
with a limit of memory, and the first that the kernel kills where memory is short. It writes to a log of the run. A
thread of the rank starts it, so that nobody waits for that, and starts it again, rarely, if it has died. At the end of
the attempt it gets SIGTERM, and SIGKILL soon after; when its rank dies, however, the kernel kills it at once.

`BesideTraining` has the programs that the rooms want in one attempt, on one rank (`laststep.rooms`). Where the run
continues by itself nobody waits for them: what they have not done, those of the next attempt do.

`signpost` shows such programs what the loop of the first rank of a node does right now.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from laststep import rooms
from laststep.ranks.process import beside, die_with_parent, start_thread, started
from laststep.ranks.world import World, hostname
from laststep.rundir import RunDir
from laststep.say import say

POLL_S = 0.25
# How long after its start a program that has died is started again, at least, and after each further death.
AGAIN_S = (30.0, 300.0)
# How long programs may take to end where the run continues by itself, and where nothing follows.
SHORT_S, LAST_S = 0.5, 10.0
KILLED_S = 2.0  # to die of SIGKILL, unless they wait for a disk
LOG_BYTES = 1 << 20  # a log that is longer is begun anew
LOWEST = 19  # man 2 nice
SAY = "say: "  # a program's line that begins so is said by its rank as well, in the log that people read
SAY_EVERY_S = 1.0


class Beside(NamedTuple):
    """A program: `python -m MODULE RUN_FOLDER WORDS`."""

    name: str  # of its log
    module: str
    # Beside rank 0 of the run; beside one rank of each node; or once an end of the attempt has been recorded, beside
    # the rank that has recorded it.
    where: Literal["run", "node", "end"] = "run"
    words: tuple[str, ...] = ()
    memory_gb: float = 4.0  # of address space


class Program:
    """A process beside this one. `start` and `end` return at once."""

    def __init__(self, program: Beside, run: RunDir, log: Path) -> None:
        self.name = program.name
        limits = (str(os.getpid()), str(int(program.memory_gb * 2**30)))
        words = (program.module, str(run.path), *program.words)
        code = "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; from laststep.ranks import beside; "
        package = str(Path(__file__).parent.parent.parent)
        self._command = [sys.executable, "-c", f"{code}beside.become()", package, *limits, *words]
        self._log = log
        self._read = 0  # how far its log was read
        self._once = program.where == "end"
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and start it again when it dies."""
        self._thread = start_thread(f"beside-{self.name}", self._keep)

    def end(self) -> None:
        """Ask it to end, if it is one that would not end by itself."""
        self._ending.set()
        if not self._once:
            self._signal(signal.SIGTERM)

    def close(self, until: float) -> None:
        """Wait for its end until time.monotonic() is `until`, and then kill it."""
        self._ending.set()
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._signal(signal.SIGKILL)
            self._thread.join(KILLED_S)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(OSError):
                    # It leads its session, so this reaches what it has started, too.
                    os.killpg(self._process.pid, number)

    def _keep(self) -> None:
        """The thread. The kernel kills the program when this thread ends, so it lives as long as that."""
        wait_s, longest_s = AGAIN_S
        while True:
            begun = time.monotonic()
            try:
                self._run()
            except (OSError, subprocess.SubprocessError) as error:
                say(f"WARNING: {self.name} cannot start: {error}; the training continues without it")
            if self._once or self._ending.wait(max(0.0, begun + wait_s - time.monotonic())):
                return
            wait_s = min(4 * wait_s, longest_s)

    def _run(self) -> None:
        """Run it once, to its end. Raises OSError."""
        with self._lock:
            if self._ending.is_set() and not self._once:
                return
            process = self._process = started(self._spawn)
            beside.add(process.pid)
        looked_at = 0.0
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if time.monotonic() - looked_at > SAY_EVERY_S:
                    looked_at = time.monotonic()
                    self._say_lines()
            self._say_lines()
        finally:
            with self._lock:
                self._process = None
            beside.discard(process.pid)

    def _say_lines(self) -> None:
        """Say what the program has asked for in its log."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._read)
            while (line := log.readline()).endswith(b"\n"):
                self._read = log.tell()
                if line.startswith(SAY.encode()):
                    say(line.decode(errors="replace").removeprefix(SAY))

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self._log.stat().st_size > LOG_BYTES:
                os.truncate(self._log, 0)
        with self._log.open("ab") as log:
            self._read = log.tell()
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def become() -> None:
    """In the process that `Program` has started: take its limits, and run its module."""
    _, parent, memory, module, *words = sys.argv[1:]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):  # it has died before the kernel knew
        os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for limit, value in ((resource.RLIMIT_AS, int(memory)), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # a lower limit is set already
            resource.setrlimit(limit, (value, value))
    with contextlib.suppress(OSError):
        os.nice(LOWEST)
    # They ask ranks for a stop, and some sites send them to all processes of a job.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.argv[:] = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class BesideTraining:
    """The programs of all rooms in one attempt, on one rank."""

    def __init__(self, config: Any, run: RunDir, world: World) -> None:
        self._run, self._world = run, world
        self._wanted: Sequence[Beside] = rooms.programs(config, run)
        self._programs: list[Program] = []
        self._follows = True  # the run continues by itself, as far as this rank knows
        self._asked_at: float | None = None  # time.monotonic()
        self._closing = threading.Lock()

    @property
    def has_programs(self) -> bool:
        """Whether any room wants one."""
        return bool(self._wanted)

    def begin(self) -> None:
        """Start what runs from the beginning."""
        self._start("run", self._world.rank == 0)
        self._start("node", self._world.local_rank == 0)

    def ended(self, record: Mapping[str, Any], by_us: bool = True) -> None:
        """The end of the attempt has been recorded, see AttemptRecord, by this rank or by another. Returns at once."""
        self._follows = bool(record.get("requeue"))
        self._ask()
        if by_us:
            self._start("end", True, str(record["attempt"]))

    def close(self) -> None:
        """The rank is about to end: wait for the programs, shortly where the run continues, and kill them."""
        with self._closing:
            self._ask()
            assert self._asked_at is not None
            until = self._asked_at + (SHORT_S if self._follows else LAST_S)
            for program in self._programs:
                program.close(until)
            self._programs = []

    def _ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        for program in self._programs:
            program.end()

    def _start(self, where: str, is_here: bool, *words: str) -> None:
        for one in self._wanted:
            if one.where == where and is_here:
                host = f"_{hostname()}" if where == "node" and self._world.nodes > 1 else ""
                log = self._run.beside_log(f"{one.name}{host}")
                program = Program(one._replace(words=(*one.words, *words)), self._run, log)
                with contextlib.suppress(RuntimeError):  # this node has no thread to give
                    program.start()
                    self._programs.append(program)


PAGE_BYTES = 64
SHARED_MEMORY = "/dev/shm"


class Signpost:
    """Shows programs on this node what this process's loop does right now: a word in a page of shared memory, so that
    showing it waits for nothing. Nothing is shown until `open`, nor where there is no such memory."""

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None
        self._path: Path | None = None
        self.shown = ""

    def open(self, run: Path) -> Callable[[], None]:
        """Show it from now on to those who `read_signpost`; returns what ends that."""
        path = _page_of(run)
        with contextlib.suppress(OSError, ValueError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # of an attempt before
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, PAGE_BYTES)
                self._page = mmap.mmap(file, PAGE_BYTES)
                self._path = path
            finally:
                os.close(file)
            self.show(self.shown)
        return self.close

    def show(self, what: str) -> None:
        """This is what the process does from now on."""
        self.shown = what
        if self._page is not None:
            self._page[:] = what.encode()[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """This is what the process does meanwhile."""
        before = self.shown
        self.show(what)
        try:
            yield
        finally:
            self.show(before)

    def close(self) -> None:
        """Show nothing any more."""
        page, path, self._page, self._path = self._page, self._path, None, None
        if page is not None and path is not None:
            page.close()
            with contextlib.suppress(OSError):
                path.unlink()


signpost = Signpost()


def read_signpost(run: Path) -> str:
    """What the first rank of the run on this node does; empty where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        file = os.open(_page_of(run), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_uid == os.geteuid():
                return os.read(file, PAGE_BYTES).rstrip(b"\0").decode(errors="replace")
        finally:
            os.close(file)
    return ""


def _page_of(run: Path) -> Path:
    """Where it stands: the same on a node for all processes of a run."""
    folder = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir()
    return Path(folder) / f"laststep-{os.geteuid()}-{hashlib.sha256(str(run).encode()).hexdigest()[:16]}"

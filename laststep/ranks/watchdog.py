"""The watchdog: ends an attempt in which a rank died or is stuck, and names that rank and its line of code.

Dead: rank 0 holds a connection to each other rank (`Lifelines`). However a process ends, the kernel closes it, and rank
0 reads the end of the stream, whether collectives fail (gloo) or wait forever (NCCL). A rank that leaves in an orderly
way says so first. Only an end that the other side's kernel has sent counts: one that the network has cut may be silent,
or fail without a death. A node without power closes nothing: the first rank of each node asks the host of the next one
from time to time (`Neighbour`). The death of rank 0 needs no lifeline: it serves the store.

Stuck: there are three threads in each rank, which cost the training nothing. The beat thread sends a heartbeat, with
the rank's progress, to the store, and reads from it a fault that another rank has reported; on rank 0 it also compares
all heartbeats. The watch thread notices if the store no longer answers, if the grace period after a signal runs out and
if the run's folder is gone. The device thread asks how far the device has come; on a GPU the CPU is ahead of it.

Silence is counted in rounds of the listening thread, not by a clock that may be set, or that moves on while a process
is suspended.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from laststep.ranks.beside import signpost
from laststep.ranks.fault import Fault, blamed_host
from laststep.ranks.process import cpu_s_of_descendants, identity, is_running, run_time, start_thread
from laststep.ranks.seal import Seal
from laststep.ranks.world import World
from laststep.say import say

if TYPE_CHECKING:
    from laststep.ranks.meeting import SealedStore


BEAT_S = 0.5
SLOW_WINDOW_S = 60.0
WORK_S = 0.02  # of the CPU between two heartbeats: processes that only wait, as `InterpreterWatch`'s, use less
# A rank that the others wait for counts as dead when it has sent no heartbeat for this long. A starved host delays
# heartbeats by several seconds, and the end of the attempt is a high price for that. In a hurry, that is after a
# signal, the others may be killed soon, and lose nothing by saving without it: half of the grace period leaves time.
DEAD_AFTER_S, DEAD_IN_A_HURRY_S = 60.0, 15.0


@dataclass(frozen=True)
class Beat:
    """A heartbeat of one rank."""

    host: str
    round: int
    progress: int  # units of work begun so far
    phase: str
    where: str  # the innermost line of the main thread
    waits: bool  # that line is where a rank waits for others: in torch's own code
    busy_s: float  # spent so far on its own work, not on waiting for others
    process: str = ""  # see `laststep.ranks.process.identity`
    device: int = 0  # how far its device has come; the CPU may be ahead of it
    activity: int = 0  # changes while its work gets on in ways that do not say how far it has come

    @property
    def work(self) -> tuple[int, int, int]:
        """What changes as long as the rank gets anything done."""
        return self.progress, self.device, self.activity


@dataclass(frozen=True)
class Probes:
    """What the watchdog asks of its rank, from its own threads, twice a second."""

    world: Callable[[], World]
    ticks: Callable[[], int] = lambda: 0  # units of work begun so far
    check: Callable[[], Fault | None] = lambda: None  # a fault that the rank finds itself, without its peers
    of_death: Callable[[int], Fault] = lambda rank: Fault("failed", f"rank {rank} has ended", cause=False)
    others_gave_up: Callable[[], bool] = lambda: False  # whether another rank has begun its end by fault
    grace_s: Callable[[], float] = lambda: 2 * DEAD_IN_A_HURRY_S  # from a stop signal to SIGKILL
    sign: Callable[[bool], None] = lambda timed: None  # see `InterpreterWatch.sign`


class Watchdog:
    """Watches one attempt from this rank. `on_fault` is called once, in a separate thread."""

    # Phases without a timeout, since there is no telling how long is too long: a download may take hours.
    UNTIMED_PHASES = ("starting", "preparing data")

    def __init__(self, probes: Probes, hang_timeout_s: float, on_fault: Callable[[Fault], None]) -> None:
        self.phase = "starting"
        self._phases = 0  # entered so far, and the progress within them
        self._compiling, self._where, self._children_s = False, "", 0.0
        self.activity = 0  # any thread may add to it, to show that work gets on: a file grows
        self._probes = probes
        self._timeout_s, self._on_fault = hang_timeout_s, on_fault
        self._busy_s: Callable[[], float] = lambda: 0.0
        self._device = 0  # how far this rank's device has come
        self._store: SealedStore | None = None
        self._reports: SealedStore | None = None
        self._round, self._unanswered_s = 0, 0.0
        self._silent_s = [0.0] * probes.world().size  # each rank's silence, as rank 0 counts it
        self._ended: set[int] = set()  # ranks whose processes have ended, as rank 0 knows
        self._lines: Lifelines | Lifeline | None = None
        self._process = identity()
        self._still_s = 0.0  # since any rank made progress
        self._beats: list[Beat] = []
        self._window: tuple[float, list[Beat]] | None = None
        self._slow_host = ""  # of the straggler of the last window
        self._faulted = threading.Lock()
        self._closed, self._awake = threading.Event(), threading.Event()
        self._main_thread = threading.main_thread().ident or 0
        self._threads: list[threading.Thread] = []
        self._start_thread("watch", self._watch)

    def join(self, store: SealedStore, host: str, seal: Seal) -> None:
        """This rank has reached the store that connects the ranks, at rank 0's `host`: start sending heartbeats."""

        world = self._probes.world()
        # A client of TCPStore serves one caller at a time.
        self._store, self._reports = store.clone(), store.clone()
        if world.rank:
            self._lines = Lifeline(world, host, store.clone(), seal)
        elif world.size > 1:
            self._lines = Lifelines(world, host, store, seal, self._has_ended)
        self._start_thread("beat", self._beat)

    def measure(self, busy_s: Callable[[], float]) -> None:
        """Have stragglers named: `busy_s` returns the seconds this rank has spent so far on its own work. Every rank's
        loop calls this, or none."""
        self._busy_s = busy_s

    def follow(self, passed: Callable[[], int]) -> None:
        """Compare how far the ranks' devices have come, too: `passed` returns a number that grows with that. It raises
        RuntimeError once the device has failed, long before a main thread that waits for a collective."""
        self._start_thread("device", lambda: self._follow(passed))

    def enter(self, phase: str) -> None:
        """The rank enters the next phase of the attempt; that counts as progress."""
        self.phase = phase
        signpost.show(phase)
        self._phases += 1
        self._sign()

    def advance(self, count: int = 1) -> None:
        """The rank has made progress within its phase, which no tick counts. Any thread may call this."""
        self._phases += count

    def compiling(self, begins: bool) -> None:
        """torch's compiler begins or ends its work, which may take longer than any timeout. Until it ends, the rank
        makes progress as long as its main thread moves from line to line, or a process works that it has started."""
        self._compiling, self._children_s = begins, cpu_s_of_descendants(os.getpid())
        self.advance()

    def is_dead(self, rank: int, in_a_hurry: bool) -> bool:
        """Whether that rank's process has ended, or is silent for so long that it counts as dead. One that runs
        on rank 0's node is only starved or suspended. Only rank 0 knows; elsewhere False."""
        if rank in self._ended or in_a_hurry:
            return rank in self._ended or self._silent_s[rank] >= min(DEAD_IN_A_HURRY_S, self._probes.grace_s() / 2)
        return self._silent_s[rank] >= DEAD_AFTER_S and not self._runs_here(rank)

    def _runs_here(self, rank: int) -> bool:
        beat = self._beats[rank]
        return beat.host == self._beats[0].host and is_running(beat.process)

    def report(self, fault: Fault) -> None:
        """Report a fault to every rank, this one included. Only the first report counts."""
        if not self._closed.is_set():
            # In a thread: the store itself may have failed, and may take a long time to say so.
            with contextlib.suppress(RuntimeError):  # no thread: the others notice by this rank's end
                self._start_thread("report", lambda: self._publish(fault))
            self._handle(fault)

    def _has_ended(self, rank: int) -> None:
        """On rank 0: the process of another rank has ended. The beat thread reports it, unless that rank has reported
        why."""
        self._ended.add(rank)
        self._awake.set()

    def close(self) -> None:
        """Stop watching: this rank has no more work to do with the others."""
        self._closed.set()
        self._awake.set()
        if self._lines is not None:
            self._lines.close()
        self._probes.sign(False)
        for thread in self._threads:
            thread.join(timeout=5)

    def _start_thread(self, name: str, work: Callable[[], None]) -> None:
        self._threads.append(start_thread(name, work))

    def _publish(self, fault: Fault) -> None:
        if self._reports is not None:
            with contextlib.suppress(Exception):
                self._reports.compare_set("watch/fault", "", json.dumps(asdict(fault)))

    def _handle(self, fault: Fault) -> None:
        """Start the end by fault on this rank, once."""
        if not self._closed.is_set() and self._faulted.acquire(blocking=False):
            try:
                start_thread("fault", lambda: self._on_fault(fault))
            except RuntimeError:  # the kernel has no thread: what this one does otherwise is not needed any more
                self._on_fault(fault)

    def _watch(self) -> None:
        """The watch thread."""
        while not self._closed.wait(BEAT_S):
            self._sign()
            if (fault := self._probes.check()) is not None:
                self.report(fault)
            if self._store is not None:
                self._unanswered_s += BEAT_S
                if self._is_too_long(self._unanswered_s):
                    host, waited = self._probes.world().host_of(0), f"{self._unanswered_s:.0f} s"
                    text = f"rank 0 on {host} has not answered for {waited}"
                    self._handle(Fault("hung", text, silent=True, blames=host))

    def _is_too_long(self, silence_s: float) -> bool:
        """Whether to stop waiting for a silent rank. If the network splits, neither side receives the other's report:
        so after half of the timeout a rank looks whether another one has given up, and then gives up too."""
        return silence_s > self._timeout_s or (silence_s > self._timeout_s / 2 and self._probes.others_gave_up())

    def _sign(self) -> None:
        """Show that Python threads run: none does while user code holds the interpreter's lock."""
        self._probes.sign(self.phase not in self.UNTIMED_PHASES and not self._closed.is_set())

    def _follow(self, passed: Callable[[], int]) -> None:
        """The device thread. It does nothing else: while a device hangs, its driver may not answer."""
        while not self._closed.wait(BEAT_S):
            try:
                self._device = passed()
            except RuntimeError as error:
                world = self._probes.world()
                host = world.host_of(world.rank)
                text = f"rank {world.rank} on {host} failed:\n{error}"
                return self.report(Fault("failed", text, blames=blamed_host(error, host)))

    def _beat(self) -> None:
        """The beat thread."""
        assert self._store is not None
        world = self._probes.world()
        keys = [f"watch/beat/{rank}" for rank in range(world.size)]
        all_here = False
        try:
            while not self._closed.is_set():
                self._round += 1
                self._store.set(keys[world.rank], json.dumps(asdict(self._own_beat())))
                if self._store.check(["watch/fault"]):
                    self._handle(Fault(**json.loads(self._store.get("watch/fault"))))
                if self._ended and not self._faulted.locked():
                    self.report(self._probes.of_death(min(self._ended)))
                if world.rank == 0 and (all_here := all_here or self._store.check(keys)):
                    self._compare([Beat(**json.loads(beat)) for beat in self._store.multi_get(keys)])
                self._unanswered_s = 0.0
                self._awake.wait(BEAT_S)
                if not self._closed.is_set():
                    self._awake.clear()
        except Exception as error:  # any error of the store: it no longer connects the ranks
            rank_0 = f"rank 0 on {self._probes.world().host_of(0)}"
            self._handle(Fault("failed", f"{rank_0} is gone ({error})", cause=False))

    def _own_beat(self) -> Beat:
        world = self._probes.world()
        where, waits = innermost_line(self._main_thread)
        if self._compiling and (where != self._where or self._children_work()):
            self.advance()
        self._where = where
        own = (world.host_of(world.rank), self._round, self._phases + self._probes.ticks(), self.phase, where, waits)
        return Beat(*own, self._busy_s(), self._process, self._device, self.activity)

    def _children_work(self) -> bool:
        """Whether processes that this one has started have worked since the last look: torch's compiler waits for a C++
        compiler, for minutes on a busy machine."""
        before, self._children_s = self._children_s, cpu_s_of_descendants(os.getpid())
        return self._children_s >= before + WORK_S

    def _compare(self, beats: list[Beat]) -> None:
        """On rank 0: look for silent and stuck ranks in everyone's latest heartbeat."""
        before = self._beats or beats
        # An older one is a replay: somebody else's, to hide a hang.
        beats = self._beats = [max(pair, key=lambda beat: beat.round) for pair in zip(before, beats)]
        for rank, (old, new) in enumerate(zip(before, beats)):
            self._silent_s[rank] = self._silent_s[rank] + BEAT_S if new.round == old.round else 0.0
        moved = any(old.work != new.work for old, new in zip(before, beats))
        untimed = any(beat.phase in self.UNTIMED_PHASES for beat in beats)
        self._still_s = 0.0 if moved or untimed else self._still_s + BEAT_S
        silent = [rank for rank, seconds in enumerate(self._silent_s) if self._is_too_long(seconds)]
        if silent or self._still_s > self._timeout_s:
            waited_s = min((self._silent_s[rank] for rank in silent), default=self._still_s)
            text = f"{name_stuck(beats, silent)}, for {waited_s:.0f} s"
            host = hosts_of_stuck(beats, silent) or self._slow_host
            self.report(Fault("hung", text, silent=bool(silent), blames=host))
        self._name_straggler(beats)

    def _name_straggler(self, beats: list[Beat]) -> None:
        if self._window is None or self._window[1][0].phase != beats[0].phase:
            self._window = (time.monotonic(), beats)
        since, before = self._window
        seconds = time.monotonic() - since
        if seconds > SLOW_WINDOW_S and beats[0].progress > before[0].progress:
            self._slow_host = straggler(before, beats, seconds)
            self._window = (time.monotonic(), beats)


def find_stuck(beats: Sequence[Beat], silent: Sequence[int]) -> Sequence[int]:
    """The ranks that the others wait for: the silent ones; else, of those with the least progress, the ones whose main
    thread does not wait for others."""
    done = [beat.progress + beat.device for beat in beats]
    behind = [rank for rank, count in enumerate(done) if count == min(done)]
    return silent or [rank for rank in behind if not beats[rank].waits] or behind


def name_stuck(beats: Sequence[Beat], silent: Sequence[int]) -> str:
    """These ranks, with their hosts and what they do."""
    symptom = "gives no sign of life, last seen in" if silent else "is stuck in"
    stuck = [(rank, beats[rank]) for rank in find_stuck(beats, silent)]
    return "; ".join(f"rank {rank} on {beat.host} {symptom} {beat.where}" for rank, beat in stuck)


def hosts_of_stuck(beats: Sequence[Beat], silent: Sequence[int]) -> str:
    """Their hosts, for `Fault.blames`; empty if all ranks are behind alike, which is nobody's fault."""
    stuck = find_stuck(beats, silent)
    return ",".join(dict.fromkeys(beats[rank].host for rank in stuck)) if len(stuck) < len(beats) else ""


def straggler(before: Sequence[Beat], after: Sequence[Beat], seconds: float) -> str:
    """Print which rank made the others wait, if one did, and return its host: it was busy with its own work for more
    than twice as long as the median rank, and that cost more than a tenth of the time. `before` and `after` are two
    heartbeats of each rank, `seconds` and at least one step apart."""
    steps = after[0].progress - before[0].progress
    busy_s = [new.busy_s - old.busy_s for old, new in zip(before, after)]
    slowest = max(range(len(busy_s)), key=lambda rank: busy_s[rank])
    median = statistics.median_low(busy_s)
    late = busy_s[slowest] - median
    if late <= median or late <= 0.1 * seconds:
        return ""
    host, own_s, median_s = after[slowest].host, busy_s[slowest] / steps, median / steps
    say(
        f"rank {slowest} on {host} is slowing the others down: {own_s:.3g} s of its own work per step, the median rank "
        f"{median_s:.3g} s"
    )
    return host


def innermost_line(thread: int) -> tuple[str, bool]:
    """The function, file and line that a thread is executing, and whether it waits for other ranks there."""
    frame: Any = sys._current_frames().get(thread)
    if frame is None:
        return "?", False
    file = frame.f_code.co_filename
    folder = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "")
    in_torch = bool(folder) and file.startswith(folder + os.sep)
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})", in_torch


UNUSED_PORT = 9  # "discard"
ASK_EVERY_S = 5.0
HOST_ANSWERS_S = 3.0


class Neighbour:
    """Asks a host, in a thread, until it is dead. `ticks` counts this rank's progress."""

    def __init__(self, host: str, ticks: Callable[[], int], answers: Callable[[str], bool] | None = None) -> None:
        self.host = host
        self._ticks = ticks
        self._answers = answers or host_answers
        self._silent_rounds = 0  # not by a clock, so a process that was suspended finds nobody dead
        self._closed = threading.Event()
        start_thread("neighbour", self._ask)

    @classmethod
    def of(cls, world: World, ticks: Callable[[], int]) -> Neighbour | None:
        """The neighbour that this rank has to ask, if any. Call once the ranks know each other's hosts."""
        hosts = list(dict.fromkeys(world.hosts))
        if len(hosts) < 2 or world.hosts.index(world.hosts[world.rank]) != world.rank:
            return None
        return cls(hosts[(hosts.index(world.hosts[world.rank]) + 1) % len(hosts)], ticks)

    @property
    def is_dead(self) -> bool:
        """Whether the host has lost power, or its network."""
        return self._silent_rounds * ASK_EVERY_S >= DEAD_AFTER_S

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _ask(self) -> None:
        answered, done = False, -1
        while not self.is_dead and not self._closed.wait(ASK_EVERY_S):
            if self._answers(self.host):
                answered, self._silent_rounds = True, 0
            elif answered:
                before, done = done, self._ticks()
                self._silent_rounds = self._silent_rounds + 1 if done == before else 0


def host_answers(host: str) -> bool:
    """Whether the host accepts or refuses a connection."""
    try:
        socket.create_connection((host, UNUSED_PORT), HOST_ANSWERS_S).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
    return True


KEY = "lifeline"
LEAVES = b"."
CONNECT_S = 30.0
LOOK_S = 0.05
LONGEST_LINE = 1024  # bytes of a connection's first line


class Lifelines:
    """Rank 0's ends, at the address `host` that its store has. `on_end` is called, in another thread, with the number
    of each rank whose process has ended."""

    def __init__(self, world: World, host: str, store: SealedStore, seal: Seal, on_end: Callable[[int], None]) -> None:
        self._size, self._seal, self._on_end = world.size, seal, on_end
        self._nonce = secrets.token_hex(8)
        from laststep.ranks.meeting import listen, named_address  # imports torch

        self._listener = listen(named_address(world, host))
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for one in (self._listener, self._woken):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        self._said: dict[socket.socket, bytes] = {}  # the first lines of those that have not said who they are
        self._ranks: dict[socket.socket, int] = {}
        store.set(KEY, json.dumps({"port": self._listener.getsockname()[1], "nonce": self._nonce}))
        self._thread = start_thread("lifelines", self._watch)

    def close(self) -> None:
        """Report no further end."""
        self._wake.close()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._woken:
                    return self._end()
                if one is self._listener:
                    self._accept()
                elif one in self._ranks:
                    self._read_end(one)
                else:
                    self._read_line(one)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connected, _ = self._listener.accept()
            connected.setblocking(False)
            self._said[connected] = b""
            self._selector.register(connected, selectors.EVENT_READ)

    def _read_line(self, one: socket.socket) -> None:
        """Read who this is. Anybody but a rank of this attempt, once, is refused."""
        data = b""
        with contextlib.suppress(OSError):
            data = one.recv(LONGEST_LINE)
        self._said[one] += data
        line, end, rest = self._said[one].partition(b"\n")
        if data and not end and len(line) < LONGEST_LINE:
            return
        del self._said[one]
        rank = self._seal.open(f"{KEY}/{self._nonce}", line) if end and not rest else None
        if rank is None or not 0 < int(rank) < self._size or int(rank) in self._ranks.values():
            return self._drop(one)
        self._ranks[one] = int(rank)

    def _read_end(self, one: socket.socket) -> None:
        try:
            ended = not one.recv(1)
        except ConnectionResetError:
            ended = True
        except OSError:  # of the network: nothing is known any more
            ended = False
        rank = self._ranks.pop(one)
        self._drop(one)
        if ended:
            self._on_end(rank)

    def _drop(self, one: socket.socket) -> None:
        self._selector.unregister(one)
        one.close()


class Lifeline:
    """Another rank's end. It connects in a thread, to the host at which this rank reaches rank 0."""

    def __init__(self, world: World, host: str, store: SealedStore, seal: Seal) -> None:
        self._rank, self._host, self._store, self._seal = world.rank, host, store, seal
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._thread = start_thread("lifeline", self._connect)

    def close(self) -> None:
        """Leave: from now on the end of this process is no death."""
        self._closed.set()
        self._thread.join(timeout=5)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(LEAVES)
            self._socket.close()

    def _connect(self) -> None:
        deadline = run_time() + CONNECT_S
        try:
            while not self._store.check([KEY]):  # not `get`, which would wait in C
                if self._closed.wait(LOOK_S) or run_time() > deadline:
                    return
            place = json.loads(self._store.get(KEY))
            connected = socket.create_connection((self._host, place["port"]), timeout=CONNECT_S)
            # A child that outlived this process would keep the connection open, and nobody would notice the death.
            os.register_at_fork(after_in_child=connected.close)
            connected.sendall(self._seal.seal(f"{KEY}/{place['nonce']}", str(self._rank)) + b"\n")
            self._socket = connected
        except OSError as error:
            say(
                f"WARNING: rank {self._rank} cannot connect to rank 0 on {self._host} ({error}): where collectives do "
                "not fail, its death is noticed only after launch.hang_timeout_s"
            )
        except Exception:  # the store is gone, and with it rank 0
            return

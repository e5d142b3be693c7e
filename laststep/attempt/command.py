"""One attempt of a run whose ranks run a command that does not know Laststep: on one rank, from its start to its end.

Nothing here imports torch: the command may be of JAX or C++. It gets torchrun's variables, and saves what it likes in
LASTSTEP_FOLDER. The ranks tell each other in the folder of the attempt, rescue/ATTEMPT/, what they would otherwise
agree on by collectives:

    start           rank 0 has recorded that the attempt begins: MASTER_ADDR, MASTER_PORT and the attempt's number
    stop            the number of a signal that asks for a stop
    command_RANK    how that rank's command has ended
    gone_RANK       its supervisor has seen the rank itself end, see laststep/job/supervisor.py

    the commands of all ranks end with status 0     the run has finished
    a signal asks for a stop                        each rank passes it on and waits for the end of its command, until
                                                    SIGKILL is near; rank 0 records the end, and requeues the job
    a command ends in any other way                 that rank records the fault; the others end their commands

What a command has started ends with it. A command that hangs is left alone: nobody could tell.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from laststep import rooms, script
from laststep.attempt.attempt import Stopped
from laststep.attempt.ending import AttemptState, ending_by_signal, record_end, requeue
from laststep.attempt.grace import GracePeriod, LimitWarning
from laststep.attempt.predecessor import Predecessor
from laststep.attempt.rescue import GONE, clear, exiting_file, make_folder
from laststep.attempt.restart import USER_SIGNALS
from laststep.checkpoint.files import Patience
from laststep.checkpoint.store import START_S
from laststep.config.config import Config
from laststep.ranks import disk
from laststep.ranks.disk import FreshView, look_anew
from laststep.ranks.fault import MeetingError, Retry
from laststep.ranks.launchers import EXPORTED, address_towards, export_world, free_port, restarts_in_place
from laststep.ranks.process import (
    Signals,
    children_of,
    die_with_parent,
    end_descendants,
    identity,
    keep_orphans,
    run_time,
)
from laststep.ranks.world import World, hostname
from laststep.records import kept_files
from laststep.records.attempt_record import AttemptRecord
from laststep.records.attempts import begin_attempt, never_began
from laststep.rundir import RunDir, write_whole
from laststep.say import say

POLL_S = 0.1  # how often a rank looks at its command and its signals
# How often at its attempt's folder: all ranks do, for days.
LOOK_S, LOOK_S_PER_RANK = 0.25, 0.01
# A signal may reach the command before it reaches its rank; a command that it has killed has not failed.
SIGNAL_S = 1.0
# After a fault the commands of the other ranks get SIGTERM, and after this time SIGKILL.
FAULT_S = 10.0
STOP_S = 60.0  # how long rank 0 waits at a stop for the commands of others, once its own has ended
MEETING_S = 60.0  # for rank 0 to begin, at least; launch.hang_timeout_s where that is longer
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
# What would make a program that the command starts mistake itself for this rank.
OURS = re.compile("SUBMITIT_|LASTSTEP_(RESTARTS|STEP_RESTARTS|SIGNALLED|BATCH_HOST|JOB|WORKING_FOLDER|SCRIPT)")


class Board(NamedTuple):
    """What the ranks have told each other."""

    ended: dict[int, int]  # how each rank's command has ended: its exit status, or the negative number of a signal
    gone: frozenset[int]  # the ranks that have failed themselves
    stop: int | None

    @property
    def has_failed(self) -> bool:
        """Whether the command of any rank has failed, or a rank is gone."""
        return bool(self.gone) or any(self.ended.values())


class CommandAttempt:
    """This rank's part in an attempt."""

    def __init__(self, config: Config, run: RunDir, world: World, signals: Signals) -> None:
        self._state = AttemptState(config, run, world, signals)
        self._run, self._config, self._signals = run, config, signals
        self._folder = run.rescues / world.attempt
        self._command: subprocess.Popen[bytes] | None = None
        self._status: int | None = None  # how the command has ended
        self._passed_on: set[int] = set()  # the signals that this rank has got, and passed on
        self._told: set[tuple[int, int]] = set()  # the processes that have got them, with the number of each
        self._board = Board({}, frozenset(), None)
        self._view = FreshView(world.size, self._folder)
        self._next_look = 0.0
        self._grace = GracePeriod(self._state)

    def run(self) -> dict[str, float]:
        """Run the command to its end; there are no metrics to return.

        Raises Stopped if a signal ended the attempt, SystemExit if the command has failed, on any rank.
        """
        world = self._state.world
        say(f"attempt begins on {time.strftime('%Y-%m-%d')}: {world}")
        warning = LimitWarning(world, self._config.launch, self._signals)
        try:
            self._begin()
            self._state.beside.begin()
            self._start()
            while self._runs():
                time.sleep(POLL_S)
            if self._wants_stop():
                self._stop()
            if self._board.has_failed:
                self._fail()
            return self._finish()
        finally:
            warning.close()
            self._grace.close()
            self._state.beside.close()
            end_descendants()

    # --- the beginning

    def _begin(self) -> None:
        """Rank 0 records that the attempt begins, and where the commands can meet; the others wait for that."""
        make_folder(self._folder)
        if self._state.world.rank == 0:
            text = self._record_begin()
            self._write("start", text)
        else:
            text = self._wait_for_start()
        host, port, number = text.split()
        self._state.set_number(int(number))
        export_world(self._state.world, host, int(port))
        rooms.export(self._config, self._run, self._state.world)
        os.environ.pop("LASTSTEP_RESUMES", None)
        os.environ |= {
            script.FOLDER: str(self._run.files),
            "LASTSTEP_ATTEMPT": number,
            "PYTHONUNBUFFERED": "1",
            **({"LASTSTEP_RESUMES": "1"} if int(number) else {}),
        }

    def _record_begin(self) -> str:
        run, world, patience = self._run, self._state.world, Patience(START_S, say)
        disk.acquire_run_lock(run.lock, world, Predecessor(run, world))
        look_anew(run.path)  # the attempt before may have ended on another host, a second ago
        if patience.insist(lambda: never_began(run, world, restarts_in_place(os.environ))):
            say("srun has ended, and the batch shell has recorded that this attempt never began; ending it")
            raise SystemExit(1)
        patience.insist(lambda: clear(run.rescues, world.attempt))
        kept = patience.insist(lambda: kept_files.kept(run)) or 0
        self._state.start_step = kept
        number = begin_attempt(run, world, kept, patience)["attempt"]
        patience.insist(lambda: kept_files.mark(run, self._config.script, number))
        return f"{_address(world)} {free_port()} {number}"

    def _wait_for_start(self) -> str:
        deadline = run_time() + max(MEETING_S, self._config.launch.hang_timeout_s)
        file = self._folder / "start"
        while run_time() < deadline and self._signals.first is None:
            self._view.refresh()
            with suppress(OSError):
                return file.read_text()
            time.sleep(POLL_S)
        if self._signals.first is not None:
            self._status = 0
            self._tell_end()  # rank 0 may wait for it
            raise Stopped(self._signals.first, self._state.world)
        raise MeetingError(f"{self._state.world}: rank 0 has not begun within {MEETING_S:.0f} s: {file} is missing")

    def _start(self) -> None:
        if self._wants_stop():
            self._status = 0  # nothing is to be ended
            return
        words = script.command_line(self._config.script)
        environment = {name: value for name, value in os.environ.items() if not OURS.match(name) and name != EXPORTED}
        keep_orphans()
        try:
            self._command = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),  # else it would outlive a rank that is killed
            )
        except OSError as error:
            say(f"{words[0]}: {error.strerror} on {hostname()}")
            self._status = 127

    # --- while it runs

    def _runs(self) -> bool:
        """Whether the attempt goes on: no signal has come, no command has failed, and not all have ended."""
        self._reap()
        if self._status is not None and self._state.world.rank not in self._board.ended:
            if self._status:
                self._await_signal()
            self._tell_end()
        self._look()
        over = self._wants_stop() or self._board.has_failed
        return not over and len(self._board.ended) < self._state.world.size

    def _reap(self) -> None:
        """Take notice of processes that have ended: the command, and what others have left to this one."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if self._command is not None and found[0] == self._command.pid:
                    self._status = self._command.returncode = os.waitstatus_to_exitcode(found[1])

    def _await_signal(self) -> None:
        """The command has failed, or a signal has ended it that this rank is still to get."""
        deadline = run_time() + SIGNAL_S
        while run_time() < deadline and not self._wants_stop():
            self._look(0.0)
            time.sleep(POLL_S)

    def _wants_stop(self) -> bool:
        return self._signals.first is not None or self._board.stop is not None

    def _look(self, every_s: float | None = None) -> None:
        """Look at what the other ranks have told, from time to time."""
        size = self._state.world.size
        if size == 1 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + (max(LOOK_S, LOOK_S_PER_RANK * size) if every_s is None else every_s)
        if self._state.world.nodes > 1:
            self._view.refresh()
        ended, gone, stop = dict(self._board.ended), set(self._board.gone), self._board.stop
        with suppress(OSError, ValueError):  # of a disk: the next look may have more luck
            for name in os.listdir(self._folder):
                what, _, rank = name.partition("_")
                if what == "command" and rank.isdecimal() and int(rank) not in ended:
                    ended[int(rank)] = int((self._folder / name).read_text())
                elif name.startswith(GONE) and rank.isdecimal():
                    gone.add(int(rank))
                elif name == "stop":
                    stop = int((self._folder / name).read_text())
        self._board = Board(ended, frozenset(gone), stop)
        if stop is not None and self._signals.first is None:  # another rank has received it
            os.kill(os.getpid(), stop)
            while self._signals.first is None:
                time.sleep(POLL_S / 10)

    def _tell_end(self) -> None:
        """Tell the other ranks how the command has ended."""
        assert self._status is not None
        self._write(f"command_{self._state.world.rank}", str(self._status))
        self._board.ended[self._state.world.rank] = self._status

    def _write(self, name: str, text: str) -> None:
        """Write a file of the attempt's folder, at once for any reader."""
        Patience(START_S, say).insist(lambda: write_whole(self._folder / name, text))

    # --- its three ends

    def _finish(self) -> dict[str, float]:
        kept = kept_files.kept(self._run) or 0
        if self._state.world.rank == 0:
            record_end(self._state, "finished", kept, kept, lost_s=0.0)
            say("finished: the command has ended with status 0 on every rank")
        return {}

    def _stop(self) -> NoReturn:
        """Pass the signal on, wait for the end of the command while there is time, and record why it came."""
        state, world, received = self._state, self._state.world, self._signals.received
        assert state.signal is not None
        if world.size > 1:
            self._write("stop", str(int(state.signal)))
        self._grace.follow()
        while not self._grace.is_over():
            for number, _ in list(received):
                self._pass_on(number)
            self._reap()
            if not self._awaits_command():
                break
            time.sleep(POLL_S)
        else:
            say("the command has not ended by itself, and SIGKILL is near")
        end_descendants()
        self._reap()
        if self._status is None:
            self._status = -signal.SIGKILL
        self._tell_end()
        deadline = run_time() + STOP_S
        while world.rank == 0 and not self._grace.is_over() and run_time() < deadline:
            self._look(0.0)
            if len(self._board.ended.keys() | self._board.gone) >= world.size:
                break
            time.sleep(POLL_S)
        record, cause = None, None
        if world.rank == 0:
            kept = kept_files.kept(self._run) or 0
            cause = ending_by_signal(state)
            blamed = [world.host_of(0)] if cause.blames_host else []
            record = record_end(state, cause.reason, kept, kept, lost_s=0.0, error=cause.error, blamed=blamed)
            if self._command is not None:
                say(f"stopped by {state.signal.name}: the command {_how(self._status)}")
        if cause is not None and cause.requeue:
            requeue(state, record, state.signals.requeue)
        raise Stopped(state.signal, world)

    def _pass_on(self, number: signal.Signals) -> None:
        """Ask the command to end, once: by SIGTERM, or by the warning before a time limit if it catches that."""
        if number in self._passed_on or self._command is None or self._status is not None:
            return
        self._passed_on.add(number)
        for pid in _addressees(self._command.pid):
            sent = number if number in USER_SIGNALS and _catches(pid, number) else signal.SIGTERM
            if (pid, sent) not in self._told:
                self._told.add((pid, sent))
                with suppress(ProcessLookupError):
                    os.kill(pid, sent)

    def _awaits_command(self) -> bool:
        """Whether the command runs, or anything that has got its signals."""
        return self._status is None or any(identity(pid) for pid, _ in self._told)

    def _fail(self) -> NoReturn:
        """Record the fault, unless another rank has, and end this rank's command."""
        world, board = self._state.world, self._board
        with suppress(OSError):
            exiting_file(self._folder, world.rank).touch()  # the others wait for that
        failed = {rank: status for rank, status in sorted(board.ended.items()) if status}
        own = failed.get(world.rank)
        if own is not None:
            self._record_failure(world.rank, f"the command {_how(own)}", killed=own == -signal.SIGKILL)
        elif not failed:
            self._record_failure(min(board.gone), "ended without a word: it was killed", killed=True)
        else:
            rank, status = next(iter(failed.items()))
            say(f"the command of rank {rank} {_how(status)}: ending that of this rank")
        self._pass_on(signal.SIGTERM)
        deadline = run_time() + FAULT_S
        while run_time() < deadline and self._awaits_command():
            self._reap()
            time.sleep(POLL_S)
        raise SystemExit(1)

    def _record_failure(self, rank: int, how: str, killed: bool) -> AttemptRecord | None:
        state, host = self._state, self._state.world.host_of(rank)
        text = f"rank {rank} on {host} failed:\n{how}"
        say(text.replace("\n", " "))
        kept = kept_files.kept(self._run) or 0
        retry: Retry = "yes" if killed or kept > state.start_step else "if_trained"
        blamed = [host] if killed else []
        return record_end(state, "failed", kept, kept, lost_s=0.0, error=text, retry=retry, blamed=blamed)


def _address(world: World) -> str:
    """Where the commands of other ranks reach that of rank 0: this host's address towards another host of the run."""
    if world.nodes == 1:
        return "127.0.0.1"
    for other in dict.fromkeys(host for host in world.hosts if host not in ("", world.hosts[0])):
        if address := address_towards(other):
            return address
    return hostname()


def _how(status: int) -> str:
    """How a command has ended, in words."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def _addressees(pid: int) -> list[int]:
    """The processes that a signal to a command is for: the command, and if it is a shell, what that has started."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() in SHELLS:
            return [pid, *(other for child in children_of(pid) for other in _addressees(child))]
    return [pid]


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (man 5 proc)."""
    with suppress(OSError, AttributeError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(int(caught[1], 16) >> (number - 1) & 1)  # type: ignore[index]
    return False

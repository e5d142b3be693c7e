"""The parent process of a rank of a job, or of `--local`: it forks the rank, and forks it again after a fault.

In a job `python -m laststep.job.supervisor -u -m MODULE WORDS...` stands where `python -u -m MODULE WORDS...`
would: srun starts one for each rank. Under `--local` the launcher starts them (laststep/submission/local.py). A
supervisor imports torch and nothing of the user's, starts no thread and touches no GPU, so that a rank can be forked
from it. A rank that starts again therefore waits neither for Slurm nor for Python nor for an import.

A supervisor passes on the signals that ask for a stop, and ends as its rank ends. But after a rank has failed, and the
other ranks have ended their attempt by fault too, the supervisors agree through the run folder:

    1. Each one says that its rank is gone. So the survivors do not wait for a rank that was killed. A rank that is
       frozen meanwhile is killed first. Where the kernel takes long to tear a process down (GPUs, pinned memory), the
       supervisor says that it is on its way.
    2. That of rank 0 waits until all ranks are gone, asks the retry policy and Slurm, and answers all supervisors. It
       waits longer for ranks of which it knows that they are ending: a dead node says nothing.
    3. They start their ranks again, or end; then srun ends, and the batch shell decides what follows (under `--local`
       the launcher). So it does at once in a job that can leave the node that is blamed. Where a node has died, the
       shell ends srun.

A disk that stalls or refuses is asked again, within these times: a supervisor that died of an error would take its rank
along. If it cannot say that its rank is gone, the survivors still notice, by the rank's closed connections.

No wait is without a deadline. A signal that arrives between two starts is passed on to the next start. But after a
SIGTERM or SIGINT a supervisor does not start its rank again: Slurm, or srun, is ending the step.
"""

from __future__ import annotations

import atexit
import gc
import os
import resource
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission

from laststep.attempt.ending import wake_supervisor
from laststep.attempt.predecessor import finish_of
from laststep.attempt.rescue import (
    exit_status,
    exiting_file,
    gone_file,
    has_begun,
    is_ending,
    make_folder,
    silent_file,
)
from laststep.attempt.restart import SHELL_KILLED, ending
from laststep.compat import compile_each_shape
from laststep.config.config import Config
from laststep.config.schema import COMMAND
from laststep.job.after_ranks import AfterRanks, starts_again_here
from laststep.ranks.disk import FreshView, look_anew, polling_round_s
from laststep.ranks.launchers import STEP_RESTARTS, detect_world, restarts_in_place
from laststep.ranks.process import STOP_SIGNALS, die_with_parent, end_descendants, keep_orphans, next_signal, stat_of
from laststep.ranks.world import World, hostname
from laststep.records.attempt_record import EndedAttempt
from laststep.records.attempts import find_record, read_answer, write_answer
from laststep.records.progress import StartupTimer
from laststep.records.retry import FAILURES
from laststep.rundir import RunDir, write_whole
from laststep.runs import run_config
from laststep.runs.unanswered import complete_in_job
from laststep.say import flush_output, say
from laststep.trainer import Trainer

ENDING = (signal.SIGTERM, signal.SIGINT)
HELD = (*STOP_SIGNALS, signal.SIGCHLD)  # blocked, and waited for
LOOK_S = 0.25  # how often a supervisor looks whether its rank is frozen
STUCK_S = 2.0  # a rank that waits for a disk, say, may wait in the kernel for a shorter time
# After a rank has failed, the survivors begin their end by fault within this time if any lives.
BEGUN_S = 5.0
REFUSED = 2  # the exit status of a rank that refuses its configuration: it would refuse it again
# The end by fault may take launch.hang_timeout_s, or this where that is shorter.
END_S = 60.0
# Once the end is recorded, all ranks are gone within this time. Those that are known to be ending may take longer: the
# kernel has gigabytes of pinned memory to release, the driver the device's.
GONE_S, ENDING_S = 5.0, 60.0
# Rank 0's supervisor, if it lives, has answered so long after it has stopped waiting for them.
ANSWER_S = 15.0
# A disk that refuses is tried again for so long, and the kernel where it has no process to give. At the limit of
# processes, or without memory, others end; after that it is the node's fault, and srun's error requeues the job.
DISK_S, FORK_S, PAUSE_S = 30.0, 60.0, 0.5
FORK_FAILED = 1  # the exit status of a supervisor without a rank
PF_EXITING = 4  # linux/sched.h, in the flags of man 5 proc
T = TypeVar("T")


class Supervisor:
    """Starts one rank, as often as it takes."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run, self._config = run, config
        self._restarts = 0
        self._pending: list[int] = []  # signals for the next start
        self._world = self._next_world()
        self._round_s = polling_round_s(self._world.size)
        self._ends = False  # after a signal that ends the step
        self._stuck_s = 0.0  # how long the rank has been waiting in the kernel
        self._said_exiting = False  # whether this supervisor has said that its rank is being torn down
        self._hung = False  # whether an attempt hung, and none has made progress since

    @classmethod
    def of_job(cls, logs: str) -> Supervisor:
        """For the rank that submitit would start with this folder."""
        os.environ["SUBMITIT_FOLDER"] = logs
        paths = JobEnvironment().paths
        complete_in_job(paths)
        trainer = DelayedSubmission.load(paths.submitted_pickle).function
        assert isinstance(trainer, Trainer)
        return cls(trainer.run, trainer.config)

    def run(self) -> None:
        """Returns in each process that is to be the rank. The supervisor ends as its last rank does."""
        self._prepare()
        while True:
            rank = self._fork()
            if rank == 0:
                return _begin_rank()
            StartupTimer.of_supervisor = None  # a later rank waits for no import
            status = self._wait(rank)
            end_descendants()  # what the rank has started and left behind
            if not _failed(status) or status == REFUSED or not self._agree(status):
                _end_as(status)
            self._restarts += 1
            self._said_exiting = False
            self._world = self._next_world()

    def _next_world(self) -> World:
        os.environ[STEP_RESTARTS] = str(self._restarts)
        return detect_world()

    def _prepare(self) -> None:
        """Import what ranks import before they run the user's code."""
        keep_orphans()
        if self._config.task == COMMAND:
            return
        if not self._world.on_slurm:
            return self._import()
        # There is nothing to save yet, and with PreemptMode=CANCEL only the batch shell can requeue the job, once srun
        # has ended: an import from a slow disk may outlast KillWait.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            self._import()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _import(self) -> None:
        """Import torch, and what of ours needs it."""
        StartupTimer.of_supervisor = timer = StartupTimer()
        with suppress(OSError):  # of the disk; the rank looks again
            if finish_of(self._run, self._config) is not None:
                return
        if self._world.rank == 0:
            say("importing torch")  # which takes seconds, on a network file system up to a minute
        gc.disable()  # see Trainer
        with suppress(Exception):  # the rank meets the same error, and says so
            from laststep.attempt import start  # noqa: F401

            compile_each_shape(say)
        timer.done("importing torch")
        gc.freeze()
        gc.enable()

    def _fork(self) -> int:
        """The pid of a new rank, and in the rank 0. Ends this process if the kernel gives no process for FORK_S."""
        deadline, said = time.monotonic() + FORK_S, False
        while True:
            flush_output()
            try:
                with warnings.catch_warnings():  # of Python 3.12 on, where numpy has started threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    return os.fork()
            except OSError as error:
                why = f"{hostname()} has no process for rank {self._world.rank} ({error.strerror})"
            if self._ends or time.monotonic() > deadline:
                say(f"{why}: ending; the limits are `ulimit -u` and the cgroup's pids.max")
                _end_as(FORK_FAILED)
            if not said:
                say(f"WARNING: {why}; trying again for {FORK_S:.0f} s")
                said = True
            self._take_signals(PAUSE_S)

    def _wait(self, rank: int) -> int:
        """Wait for the rank's end; returns its exit status, the negative number of the signal that killed it."""
        for number in self._pending:
            os.kill(rank, number)
        self._pending.clear()
        while True:
            found = next_signal(HELD, LOOK_S)
            if found is None:
                self._look_at(rank)
            elif found != signal.SIGCHLD:
                self._ends |= found in ENDING
                os.kill(rank, found)
            ended = -1
            while ended:  # also what the rank's own children have left behind
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended == rank:
                    return os.waitstatus_to_exitcode(status)

    @property
    def _folder(self) -> Path:
        return self._run.rescues / self._world.attempt

    def _look_at(self, rank: int) -> None:
        """Kill a rank that is left behind; say it if the kernel is tearing the rank down, which takes long."""
        with suppress(OSError):  # of the disk: the next look may have more luck
            state, exiting = _state(rank)
            if exiting:
                self._say_exiting()
            elif self._is_left_behind(state):
                say("killing this rank, which is frozen: its attempt ends without it")
                os.kill(rank, signal.SIGKILL)

    def _say_exiting(self) -> None:
        if not self._said_exiting and self._has_begun():
            exiting_file(self._folder, self._world.rank).touch()
            self._said_exiting = True

    def _has_begun(self) -> bool:
        look_anew(self._folder)
        return has_begun(self._folder)

    def _is_left_behind(self, state: str) -> bool:
        """Whether the rank is stopped while the others end the attempt by fault, or still stuck in the kernel once they
        have: it would hold them up. After an orderly end it is left alone."""
        if state in "Tt":
            return self._has_begun()
        self._stuck_s = self._stuck_s + LOOK_S if state == "D" else 0.0
        if self._stuck_s < STUCK_S:
            return False
        look_anew(self._run.path)
        record = find_record(self._run, self._world)
        if record is None or record["reason"] == "finished":
            return False
        # A rank that was stopped by a signal may wait for a slow disk, and has saved its steps: only a fault ends it.
        return record["reason"] in FAILURES or self._has_begun()

    def _agree(self, status: int) -> bool:
        """Whether all ranks start again, now that this one has failed."""
        if record := self._ended_record(status):
            if self._world.on_slurm and self._config.launch.chooses_nodes and record["blamed"]:
                return False  # the batch shell chooses the nodes, and ends srun even if one of them is dead
            progress = record["end_step"] - record["lost_steps"] > record["start_step"]
            self._hung = record["reason"] == "hung" or (self._hung and not progress)
            if record["requeue"] and self._answer():
                return True
        self._persist(self._give_up)
        return False

    def _ended_record(self, status: int) -> EndedAttempt | None:
        """Say that the rank is gone, and wait for the record of the attempt's end."""
        folder = self._folder

        def say_gone() -> None:
            make_folder(folder)
            write_whole(gone_file(folder, self._world.rank), str(status))

        self._persist(say_gone)
        seen: tuple[int, ...] = ()

        def changed_record() -> EndedAttempt | None:
            nonlocal seen
            with suppress(FileNotFoundError):
                found = self._run.attempts.stat()
                now = (found.st_ino, found.st_mtime_ns, found.st_size)
                if now != seen:
                    record = find_record(self._run, self._world)
                    seen = now  # not if that could not be read
                    return record
            return None

        begun = self._until(lambda: has_begun(folder) or changed_record(), BEGUN_S, folder, self._run.path)
        if not isinstance(begun, bool):
            return begun
        return self._until(changed_record, max(END_S, self._config.launch.hang_timeout_s), self._run.path)

    def _answer(self) -> bool:
        """The answer of rank 0's supervisor."""
        path, world, folder = self._run.step_restart, self._world, self._folder
        if world.rank:
            return self._read_answer()
        statuses: dict[int, int] = {}
        missing = set(range(world.size))
        soon = time.monotonic() + GONE_S

        def none_is_missing() -> bool | None:
            statuses.update((rank, status) for rank in missing if (status := exit_status(folder, rank)) is not None)
            missing.difference_update(statuses)
            if time.monotonic() < soon or all(is_ending(folder, rank) for rank in missing):
                return not missing or None
            return False

        again = bool(self._until(none_is_missing, ENDING_S, folder))
        if world.on_slurm and not again and not self._ends:
            # A node has died, and srun does not know: the batch shell ends it.
            self._persist(self._run.step_over(world.job_id).touch)
        reachable = min(statuses.values(), default=0) < 0 or self._persist(silent_file(folder).exists) == (False,)
        again = again and reachable  # where no rank was frozen, or killed, they may not reach each other
        again = again and self._persist(lambda: starts_again_here(self._run, world, self._config.launch)) == (True,)
        self._take_signals(0)  # that arrived meanwhile
        again = again and not self._ends
        return bool(self._persist(partial(write_answer, path, world, again))) and again

    def _read_answer(self) -> bool:
        """What the supervisor of rank 0 has answered; no, if it does not."""
        path, soon = self._run.step_restart, time.monotonic() + ANSWER_S

        def answer() -> bool | None:
            if (found := read_answer(path)) is not None and found.after == self._world.attempt:
                return found.again
            if time.monotonic() < soon or gone_file(self._folder, 0).exists() or is_ending(self._folder, 0):
                return None  # while it lives, it may be waiting for ranks that are ending
            return False

        return bool(self._until(answer, ENDING_S + ANSWER_S, self._run.path, self._folder))

    def _give_up(self) -> None:
        """The supervisor ends, and so does srun. But after a hang srun may never end, because it cannot reach a node;
        and the batch shell, which would go on from there, may have been killed. Then the lowest rank whose supervisor
        lives requeues the job."""
        lower = range(self._world.rank)
        look_anew(self._folder)
        if not self._world.on_slurm or any(gone_file(self._folder, rank).exists() for rank in lower):
            return
        if self._hung or (self._ends and ending(signal.SIGTERM, self._world, 0).error == SHELL_KILLED):
            job = replace(self._world, step_id=None)
            AfterRanks(self._run, job, self._config.launch).act(1, restarts=restarts_in_place(os.environ) or 0)

    def _persist(self, act: Callable[[], T]) -> tuple[T, ...]:
        """What `act` returns, as the only item. While the disk refuses it is tried again, for DISK_S unless the step
        ends; then there is no item."""
        deadline, said = time.monotonic() + DISK_S, False
        while True:
            try:
                return (act(),)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and self._run.is_gone():
                    say(f"{self._run.path} is gone: the run was deleted, and ends")
                    return ()
                if not said:
                    say(f"WARNING: {error}; trying again for {DISK_S:.0f} s")
                    said = True
            if self._ends or time.monotonic() > deadline:
                return ()
            self._take_signals(max(PAUSE_S, self._round_s))

    def _until(self, condition: Callable[[], T | None], deadline_s: float, *folders: Path) -> T | None:
        """Poll until `condition`, which looks into these folders, returns something; None at the deadline, or once the
        step ends."""
        deadline, view = time.monotonic() + deadline_s, FreshView(self._world.size, *folders)
        while not self._ends and time.monotonic() < deadline:
            view.refresh()
            with suppress(OSError):  # the next look may have more luck
                if (value := condition()) is not None:
                    return value
            self._take_signals(self._round_s)
        return None

    def _take_signals(self, wait_s: float) -> None:
        """Take the signals that are pending, after waiting up to `wait_s` for the first one."""
        found = next_signal(HELD, wait_s)
        while found is not None:
            if found != signal.SIGCHLD:
                self._ends |= found in ENDING
                self._pending.append(found)
            found = next_signal(HELD, 0)


def _begin_rank() -> None:
    """Make this process, which was just forked, a rank."""
    die_with_parent(signal.SIGKILL)
    atexit.register(wake_supervisor)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # the others until Signals.catch


def _state(rank: int) -> tuple[str, bool]:
    """The state of a process by one letter, see man 5 proc, and whether it is being torn down."""
    stat = stat_of(rank)
    return (stat[0], bool(int(stat[6]) & PF_EXITING)) if stat else ("X", True)


def _failed(status: int) -> bool:
    """Neither done nor stopped by a signal in an orderly way."""
    return status < 0 or 0 < status <= 128


def _end_as(status: int) -> NoReturn:
    """End this process as its rank has ended."""
    flush_output()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank's own is enough
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(status)


def supervise_local(folder: str) -> None:
    """Be the supervisor of a rank of `--local`; returns in each process that is to be the rank. `folder`: the run's."""
    run = RunDir(folder)
    die_with_parent(signal.SIGTERM)  # a killed launcher must not leave its ranks training unseen
    _supervise(lambda: Supervisor(run, run_config.load(run, warn=lambda _: None)))


def main(words: Sequence[str]) -> None:
    """Be the rank's supervisor, and in each process that it forks the rank."""
    _supervise(lambda: Supervisor.of_job(words[-1]))
    sys.argv = list(words[words.index("-m") + 1 :])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _supervise(make: Callable[[], Supervisor]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        supervisor = make()
    except Exception:  # the rank meets the same error, and says so
        os.environ.pop(STEP_RESTARTS, None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    else:
        supervisor.run()


if __name__ == "__main__":
    main(sys.argv[1:])

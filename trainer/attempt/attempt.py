"""One attempt at a run, on one rank: how it begins, and how it ends.

The orderly end: all ranks stop after the same step and save it together; then rank 0 records the end. If a rank has
died or is stuck, or the grace period after a signal runs out, the attempt ends by fault instead, see
trainer/attempt/end_by_fault.py.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.attempt import compiler, user_error
from trainer.attempt.end_by_fault import EndByFault, run_for
from trainer.attempt.ending import ending_by_signal, print_hint, record_end, requeue
from trainer.attempt.grace import GracePeriod
from trainer.attempt.rescue import any_survivor
from trainer.attempt.state import AttemptState
from trainer.checkpoint.store import CheckpointError, Manifest
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.observe.startup import StartupTimer
from trainer.records.attempts import begin_attempt, find_record
from trainer.rundir import RunDir
from trainer.say import say
from trainer.world import run_lock
from trainer.world.signals import Signals
from trainer.world.slurm import kill_wait_s
from trainer.world.watchdog import Fault, Probes, Watchdog
from trainer.world.world import MeetingError, World

if TYPE_CHECKING:
    from trainer.loops.loop import Loop
    from trainer.world.group import Group

# How long the threads of a rank that failed may take to end.
CLOSE_S = 10.0


class Stopped(SystemExit):
    """The ranks stopped after the same step and saved it. Not an Exception, so that nothing takes it for a failure."""

    def __init__(self, number: signal.Signals, world: World) -> None:
        # A shell reports "ended by this signal" as exit status 128 + number. But srun and mpirun take that status for a
        # failure and end the other ranks, although rank 0 may still have to requeue the job, and torchrun would restart
        # all ranks.
        exits_0 = world.launcher == "torchrun" or (world.rank and world.launcher != "submitit-local")
        super().__init__(0 if exits_0 else 128 + number)


class Attempt:
    """This rank's part in an attempt."""

    def __init__(self, config: Config, run_dir: RunDir, world: World, signals: Signals) -> None:
        self._config = config
        self._run_dir = run_dir
        self._state = AttemptState(config, run_dir, world, signals)
        self._phases = StartupTimer()
        self._grace = GracePeriod(config.launch)
        self._end_by_fault = EndByFault(self._state, self._grace)
        probes = Probes(
            world=lambda: self._state.world,
            ticks=lambda: self._state.ticks,
            check=self._end_by_fault.check,
            others_gave_up=lambda: any_survivor(run_dir.rescues / world.attempt),
        )
        self._watchdog = Watchdog(probes, config.launch.hang_timeout_s, self._end_by_fault.run)
        # Ends the threads that use the store. One that returned from torch's C++ while Python shuts down would abort
        # the process (Python before 3.14).
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._watchdog.close)

    def run(self) -> dict[str, float]:
        """Train to the end and return the metrics of the last epoch.

        Raises Stopped if a signal ended the attempt before the run was done, SystemExit if it failed and is requeued,
        else the error that made it fail.
        """
        state, world = self._state, self._state.world
        say(f"attempt begins on {time.strftime('%Y-%m-%d')}: {world}")
        try:
            candidates = self._take_run_folder() if world.rank == 0 else iter(())
            compiler.cache_in(self._run_dir.compiled) if self._config.train.compile else compiler.defer_import()
            if world.rank == 0:
                say("importing torch")  # which takes seconds, on a network file system up to a minute
            # Not at the top of this file, so that a signal during these seconds is caught too.
            from trainer.attempt import start

            self._phases.done("importing torch")
            group = start.join_ranks(state, self._watchdog)
            stop = start.prepare_stop(state, group, self._watchdog)
            self._closing.callback(stop.close)
            self._phases.done("meeting")
            self._learn_kill_wait(group)
            checkpoint = start.read_checkpoint(state, group, candidates, self._watchdog)
            self._phases.done("reading checkpoint")
            loop = start.create_loop(state, group, stop, self._watchdog, self._phases, self._closing)
            loop.restore(checkpoint)
            finished = loop.run()
        except Exception as error:
            self._fail(error)
            raise
        return self._end_in_order(loop, group, finished)

    def _take_run_folder(self) -> Iterator[Manifest]:
        """On rank 0: lock the run folder, clean it up and record that the attempt begins.

        It begins at the checkpoint that seems to be the newest intact one: an attempt that ends before the ranks have
        met is recorded too, and they read checkpoints together. Returns that candidate and all older ones.
        """
        state = self._state
        run_lock.acquire(self._run_dir.lock, state.world)
        state.store.recover()
        shutil.rmtree(self._run_dir.rescues, ignore_errors=True)
        candidates = state.store.candidates(warn=say)
        newest = next(candidates, None)
        state.start_step = newest.step if newest else 0
        state.set_number(begin_attempt(self._run_dir, state.world, state.start_step)["attempt"])
        self._phases.done("checking checkpoints")
        return itertools.chain([newest] if newest else [], candidates)

    def _learn_kill_wait(self, group: Group) -> None:
        """Ask the cluster for its KillWait, in a job that launch.py did not submit (it asks at submission)."""
        if self._grace.kill_wait_s is None and group.world.on_slurm:
            self._grace.kill_wait_s = group.broadcast_int("grace", kill_wait_s() if group.world.rank == 0 else None)

    def _end_in_order(self, loop: Loop, group: Group, finished: bool) -> dict[str, float]:
        """The orderly end: everything is saved. Rank 0 records that before anything else, and waits for no other rank.

        Returns the metrics of the last epoch of a finished run, else raises Stopped.
        """
        state, world = self._state, group.world
        self._watchdog.close()
        step = loop.position.step
        record, wants_requeue = None, False
        if world.rank == 0:
            if finished:
                record = record_end(state, "finished", step, step, lost_s=0.0)
            else:
                reason, wants_requeue, error = ending_by_signal(state)
                record = record_end(state, reason, step, step, lost_s=0.0, error=error)
        self._closing.close()
        group.close()
        if finished:
            loop.tensorboard.complete()
            loop.progress.print_result(loop.position.metrics)
            return loop.position.metrics
        if wants_requeue:
            requeue(state, record, state.signals.requeue)
        assert state.signal is not None
        raise Stopped(state.signal, world)

    def _fail(self, error: Exception) -> None:
        """The main thread failed: report that to the other ranks and take part in the end by fault.

        Returns for the error to be raised again, or raises SystemExit if the job is requeued.
        """
        state, world = self._state, self._state.world
        rank = f"rank {world.rank} on {world.host_of(world.rank)}"
        # A ConfigError and a MeetingError explain themselves in one line; anything else needs its traceback.
        not_met, misconfigured = isinstance(error, MeetingError), isinstance(error, ConfigError)
        details = str(error) if not_met or misconfigured else user_error.describe(error)
        text = f"{rank} failed:\n{details}"
        if not (not_met or misconfigured or world.in_users_program):
            user_error.silence(error)
        if state.group is None:  # no other rank can be reached; they notice when they try to meet
            self._watchdog.close()
            if not (not_met or misconfigured):
                say(text)
            record_end(state, "failed", state.start_step, state.start_step, error=text, retry=not misconfigured)
            print_hint(state, text)
            return
        from trainer.world.group import is_peer_loss  # imports torch

        self._end_by_fault.main_thread_failed()
        if is_peer_loss(error) and not not_met:
            fault = Fault("failed", f"{rank} lost contact: {error}", cause=False)
        else:
            # An error while the data is prepared would repeat, and so would a gradient that is not finite.
            begun = state.loop is not None or isinstance(error, CheckpointError)
            may_pass = begun and not isinstance(error, (ConfigError, ArithmeticError))
            fault = Fault("failed", text, retry=not_met or may_pass)
            self._end_by_fault.set_own_failure(fault)
        self._watchdog.report(fault)
        self._end_by_fault.wait()
        if fault.cause and not self._end_by_fault.is_about(fault):
            say(fault.text)
        run_for(CLOSE_S, self._closing.close)  # in a thread: the store may no longer answer
        record = find_record(self._run_dir, state.world)
        if record is not None and record["requeue"]:
            # submitit would take any other exception for the end of the run and write it down as its result.
            raise SystemExit(1) from error

"""One attempt at a run, on one rank: how it begins, and how it ends.

The orderly end: all ranks stop after the same step and save it together; then rank 0 records the end. If a rank has
died or is stuck, or the grace period after a signal runs out, the attempt ends by fault instead, see
laststep/attempt/end_by_fault.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from laststep import compat
from laststep.attempt import user_error
from laststep.attempt.end_by_fault import EndByFault
from laststep.attempt.ending import (
    AttemptState,
    Deadline,
    LastExit,
    end_srun,
    ending_by_signal,
    print_hint,
    record_end,
    requeue,
    run_for,
)
from laststep.attempt.grace import GracePeriod, LimitWarning
from laststep.attempt.interpreter_watch import InterpreterWatch
from laststep.attempt.predecessor import Predecessor
from laststep.attempt.preflight import Preflight
from laststep.attempt.rescue import clear
from laststep.checkpoint.files import CheckpointError, Patience
from laststep.checkpoint.store import START_S, Manifest, recover
from laststep.config.config import Config
from laststep.config.errors import ConfigError, DiskError
from laststep.ranks import disk
from laststep.ranks.beside import signpost
from laststep.ranks.disk import look_anew
from laststep.ranks.fault import ONE_LINE, BadNode, DeviceConflict, Fault, MeetingError, RankEnded, Retry, blamed_host
from laststep.ranks.launchers import restarts_in_place
from laststep.ranks.process import Signals
from laststep.ranks.slurm import cluster_settings
from laststep.ranks.watchdog import Probes, Watchdog
from laststep.ranks.world import World
from laststep.records.attempt_record import AttemptRecord
from laststep.records.attempts import begin_attempt, find_record, never_began, recorded_step
from laststep.records.progress import StartupTimer
from laststep.rundir import RunDir
from laststep.say import say

if TYPE_CHECKING:
    from laststep.loops.engine import Engine
    from laststep.ranks.group import Group

# How long the threads of a rank that failed may take to end.
CLOSE_S = 10.0
# How long the farewell may take, in which the ranks wait 10 s for each other and then disconnect: NCCL may hang there.
FAREWELL_S = 15.0
# How long the end of a finished run is not recorded yet, for the last points of its curves.
CURVES_S = 5.0
# The whole end may take launch.hang_timeout_s, or this where that is shorter than a busy machine needs.
END_S = 60.0


class Stopped(SystemExit):
    """The ranks stopped after the same step and saved it. Not an Exception, so that nothing counts it as a failure."""

    def __init__(self, number: signal.Signals, world: World) -> None:
        super().__init__(status_after(number, world))


def status_after(number: signal.Signals, world: World) -> int:
    """The exit status of a rank that stopped in an orderly way."""
    # "Ended by this signal" is 128 + number. But srun and mpirun take that for a failure and end the other ranks,
    # although rank 0 may still have to requeue the job, and torchrun would restart all ranks.
    exits_0 = world.launcher == "torchrun" or (world.rank and world.launcher != "submitit-local")
    return 0 if exits_0 else 128 + number


class Attempt:
    """This rank's part in an attempt."""

    def __init__(self, config: Config, run_dir: RunDir, world: World, signals: Signals) -> None:
        self._config = config
        self._run_dir = run_dir
        self._state = AttemptState(config, run_dir, world, signals)
        self._phases = StartupTimer()
        self._grace = GracePeriod(self._state)
        self._end_by_fault = EndByFault(self._state, self._grace)
        self._closing = contextlib.ExitStack()
        probes = Probes(
            world=lambda: self._state.world,
            ticks=lambda: self._state.ticks,
            check=self._end_by_fault.check,
            of_death=self._end_by_fault.of_death,
            others_gave_up=self._end_by_fault.others_gave_up,
            grace_s=self._grace.seconds,
            sign=self._watch_interpreter(2 * config.launch.hang_timeout_s),
        )
        self._watchdog = Watchdog(probes, config.launch.hang_timeout_s, self._end_by_fault.run)
        # Ends the threads that use the store. One that returned from torch's C++ while Python shuts down would abort
        # the process (Python before 3.14).
        self._closing.callback(self._end_by_fault.close)
        self._closing.callback(LimitWarning(world, config.launch, signals).close)
        self._closing.callback(self._watchdog.close)
        self._last_exit = None if world.in_users_program else LastExit()
        self._end_s = max(END_S, config.launch.hang_timeout_s)

    def _watch_interpreter(self, timeout_s: float) -> Callable[[bool], None]:
        """Start to watch the interpreter; returns what the watchdog calls for it."""
        try:
            watch = InterpreterWatch(timeout_s)
        except OSError as error:
            say(f"WARNING: {error}: a rank whose code never releases the interpreter's lock will not be ended")
            return lambda timed: None
        self._closing.callback(watch.close)
        return watch.sign

    def run(self) -> dict[str, float]:
        """Train to the end and return the metrics of the last epoch. Raises Stopped if a signal ended the attempt
        before the run was done, SystemExit if it failed and is requeued, else the error that made it fail."""
        state, world = self._state, self._state.world
        state.beside.begin()
        if state.beside.has_programs and world.local_rank == 0:
            self._closing.callback(signpost.open(self._run_dir.path))
        say(f"attempt begins on {time.strftime('%Y-%m-%d')}: {world}")
        try:
            return self._run()
        finally:
            state.beside.close()

    def _run(self) -> dict[str, float]:
        """`run`, without the programs beside it."""
        state, world = self._state, self._state.world
        try:
            candidates = self._take_run_folder() if world.rank == 0 else iter(())
            preflight = Preflight.of(self._config, world)
            if self._config.train.compile:
                compat.cache_in(self._run_dir.compiled)
            if world.rank == 0 and world.step_restarts is None:  # else its supervisor has imported it
                say("importing torch")  # which takes seconds, on a network file system up to a minute
            # Not at the top of this file, so that a signal during these seconds is caught too.
            from laststep.attempt import start

            if not self._config.train.compile:  # the user's code may compile all the same
                compat.on_compiling(self._watchdog.compiling)
            self._phases.done("importing torch")
            preflight.wait()
            group = start.join_ranks(state, self._watchdog)
            stop = start.prepare_stop(state, group, self._watchdog)
            self._closing.callback(stop.close)
            self._phases.done("meeting")
            if self._grace.kill_wait_s is None and world.on_slurm:  # launch.py, which asks at submission, did not
                known = None if world.rank else cluster_settings().kill_wait_s
                self._grace.kill_wait_s = group.broadcast_int("grace", known)
            with start.begin_reading(state, group, candidates, self._watchdog) as reading:
                engine = start.create_engine(state, group, stop, self._watchdog, self._phases, self._closing)
                self._phases.done("data and model")
                checkpoint = start.finish_reading(state, reading, self._watchdog)
            self._phases.done("reading checkpoint")
            engine.restore(checkpoint)
            finished = engine.run()
        except Exception as error:
            if refusal := self._refusal(error):
                self._fail(refusal)
                raise refusal from None
            self._fail(error)
            raise
        try:
            return self._end_in_order(engine, group, finished)
        except SystemExit as leaving:
            if self._last_exit is not None:
                self._last_exit.status = leaving.code if isinstance(leaving.code, int) else 1
            raise

    def _take_run_folder(self) -> Iterator[Manifest]:
        """On rank 0: lock the run folder, clean it up and record that the attempt begins, at the checkpoint that seems
        to be the newest intact one. The ranks will read it together: returns that candidate and all older ones. Raises
        DiskError when the disk does not show what was saved.
        """
        state = self._state
        patience = Patience(START_S, say)
        disk.acquire_run_lock(self._run_dir.lock, state.world, Predecessor(self._run_dir, state.world))
        look_anew(self._run_dir.path)  # the attempt before may have ended on another host, a second ago
        state.store.look_anew()
        if patience.insist(lambda: never_began(self._run_dir, state.world, restarts_in_place(os.environ))):
            say("srun has ended, and the batch shell has recorded that this attempt never began; ending it")
            self._closing.close()
            raise SystemExit(1)
        patience.insist(lambda: clear(self._run_dir.rescues, state.world.attempt))
        try:
            candidates = recover(state.store, self._run_dir, say, patience)
        except DiskError:
            self._begin(recorded_step(self._run_dir), patience)  # so the error is recorded, and the run retried
            raise
        newest = next(candidates, None)
        self._begin(newest.step if newest else 0, patience)
        self._phases.done("checking checkpoints")
        return itertools.chain([newest] if newest else [], candidates)

    def _begin(self, step: int, patience: Patience) -> None:
        """Record that the attempt begins, at this step."""
        state = self._state
        state.start_step = step
        state.set_number(begin_attempt(self._run_dir, state.world, step, patience)["attempt"])

    def _end_in_order(self, engine: Engine, group: Group, finished: bool) -> dict[str, float]:
        """The orderly end: everything is saved. Rank 0 records that before anything else, and waits for no other rank.
        Returns the metrics of the last epoch of a finished run, else raises Stopped."""
        state, world = self._state, group.world
        status = 0 if finished or state.signal is None else status_after(state.signal, world)
        deadline = Deadline(self._end_s, status if world.rank else 1)
        self._watchdog.close()
        step = engine.position.step
        record, wants_requeue = None, False
        if world.rank == 0:
            if finished:
                # Before the record: if this process is killed meanwhile, the next attempt does it; after it, none.
                engine.tensorboard.complete(CURVES_S)
                record = record_end(state, "finished", step, step, lost_s=0.0)
            else:
                cause = ending_by_signal(state)
                wants_requeue, blamed = cause.requeue, [world.host_of(0)] if cause.blames_host else []
                record = record_end(state, cause.reason, step, step, lost_s=0.0, error=cause.error, blamed=blamed)
            deadline.status = status
        self._leave(group)
        if finished:
            engine.tensorboard.complete()
            engine.progress.print_result(engine.position.metrics)
            deadline.cancel()
            return engine.position.metrics
        if wants_requeue:
            requeue(state, record, state.signals.requeue)
        deadline.cancel()
        assert state.signal is not None
        raise Stopped(state.signal, world)

    def _leave(self, group: Group) -> None:
        """End the threads and disconnect. What hangs there is left behind: everything is saved and recorded."""

        def leave() -> None:
            self._closing.close()
            group.close()

        if not run_for(FAREWELL_S, leave):
            say(f"the connections to the other ranks did not close within {FAREWELL_S:.0f} s; leaving them open")
            if self._last_exit is not None:
                self._last_exit.needed = True

    def _refusal(self, error: Exception) -> ConfigError | None:
        """What to say in place of torch's error about an operator that has no deterministic form."""
        group = self._state.group
        if group is None:
            return None
        from laststep.ranks.device import is_deterministic  # imports torch

        return user_error.refused_operator(error) if is_deterministic(self._config, group.device) else None

    def _fail(self, error: Exception) -> None:
        """The main thread failed: report that to the other ranks and take part in the end by fault. Returns for the
        error to be raised again, or raises SystemExit if the job is requeued."""
        state, world = self._state, self._state.world
        rank = f"rank {world.rank} on {world.host_of(world.rank)}"
        one_line = isinstance(error, ONE_LINE)
        printed_later = one_line and (user_error.main_is_ours or world.in_users_program)
        details = str(error) if one_line else user_error.describe(error)
        # This error is the same on every rank, and names the ranks at fault.
        text = details if isinstance(error, DeviceConflict) else f"{rank} failed:\n{details}"
        if not printed_later and (user_error.main_is_ours or not world.in_users_program):
            user_error.silence(error)
        if state.group is None:  # no other rank can be reached; they notice when they try to meet
            self._watchdog.close()
            step = state.start_step
            blamed = list(filter(None, [blamed_host(error, world.host_of(world.rank))]))
            record = record_end(state, "failed", step, step, error=text, retry=_may_pass(error, state), blamed=blamed)
            user_error.write_for_torchrun(text)
            if not printed_later or (record and record["requeue"]):  # else the process ends without a message
                user_error.say_error(text)
            print_hint(state, text)
            if record and isinstance(error, MeetingError) and not isinstance(error, RankEnded):
                end_srun(state)
        else:
            record = self._end_with_others(error, rank, text, printed_later)
        if record is not None and record["requeue"]:
            # submitit would take any other exception for the end of the run and write it down as its result.
            raise SystemExit(1) from error

    def _end_with_others(self, error: Exception, rank: str, text: str, printed_later: bool) -> AttemptRecord | None:
        """Report the error of this rank's main thread to the other ranks, and wait until the attempt has ended.
        `printed_later`: as the process ends. Returns the record of the attempt."""
        from laststep.ranks.group import is_peer_loss  # imports torch

        if is_peer_loss(error):
            # A traceback would hide the error of the other rank.
            fault = Fault("failed", f"{rank} lost contact: {user_error.short(error)}", cause=False)
            self._end_by_fault.main_thread_failed(None, to_say=False)
        else:
            state, world = self._state, self._state.world
            blames = blamed_host(error, world.host_of(world.rank))
            fault = Fault("failed", text, retry=_may_pass(error, state), blames=blames)
            self._end_by_fault.main_thread_failed(fault, to_say=not printed_later)
            user_error.write_for_torchrun(text)
        self._watchdog.report(fault)
        self._end_by_fault.wait()
        deadline = Deadline(self._end_s, status=1)
        if self._last_exit is not None:  # a process group that has lost a rank may hang in its destructor
            self._last_exit.needed, self._last_exit.status = True, 2 if isinstance(error, ConfigError) else 1
        if not printed_later and fault.cause and not self._end_by_fault.is_about(fault):
            user_error.say_error(text)
        run_for(CLOSE_S, self._closing.close)  # in a thread: the store may no longer answer
        record = find_record(self._run_dir, self._state.world)
        if record is not None:
            self._state.beside.ended(record, by_us=False)
        if printed_later and record is not None and record["requeue"]:  # then the process ends without a message
            user_error.say_error(text)
        deadline.cancel()
        return record


def _may_pass(error: Exception, state: AttemptState) -> Retry:
    """Whether an error of this rank's main thread may be gone at the next attempt."""
    if isinstance(error, ArithmeticError):  # a step that is not finite
        return "no"
    if isinstance(error, ConfigError):
        in_training = state.engine is not None and state.engine.position.step > state.start_step
        return "no" if in_training else "if_trained"
    building = (
        state.group is not None
        and state.engine is None
        and not isinstance(error, (MeetingError, CheckpointError, DiskError, BadNode))
    )
    return "if_trained" if building else "yes"

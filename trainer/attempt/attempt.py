"""One attempt at a run, seen from one rank: how it begins, and every way in which it can end.

The orderly end: all ranks stop after the same step and save it together; then rank 0 records the end. When that cannot
be (a rank has died, is stuck, or the grace after a signal runs out), each rank that is left takes its part in an end by
fault, in a thread of its own, since its main thread may be waiting for the dead. See `_end_by_fault`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.attempt import compiler
from trainer.attempt.rescue import Survivor, explain, gather, given_up, take_turns
from trainer.attempt.signal_cause import USER_SIGNALS, Ending, ending
from trainer.checkpoint.store import CheckpointError, CheckpointStore, Manifest
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.observe.hints import likely_cause
from trainer.observe.startup import StartupTimer
from trainer.records.attempt_record import AttemptRecord
from trainer.records.attempts import begin_attempt, end_attempt, record_of
from trainer.records.retry import spent
from trainer.rundir import RunDir
from trainer.say import flush_output, say
from trainer.world import nccl, run_lock
from trainer.world.signals import Signals
from trainer.world.slurm import SlurmError, kill_wait_s, scontrol
from trainer.world.watchdog import Fault, Watchdog
from trainer.world.world import MeetingError, World

if TYPE_CHECKING:
    from trainer.loops.loop import Loop
    from trainer.world.group import Group
    from trainer.world.stop import Stop

# Slurm's own default (KillWait), for a run that nobody submitted to Slurm.
DEFAULT_GRACE_S = 30
# Where the grace is nearly over nothing is waited for any more: what is recorded now still is.
LAST_MOMENT_S = 3.0
# How long the threads of a rank that failed may take to end.
FAREWELL_S = 10.0
# How long a step that a fault finds in the midst of its update may take to complete it.
FREEZE_S = 10.0
# How long a main thread that was told of its rank's end may take to come out of whatever it does.
COME_OUT_S = 2.0
AGAIN = "every step is kept, start it again under the same name to go on"


class Stopped(SystemExit):
    """The ranks stopped after the same step and saved it. Not an Exception, so that nothing takes it for a failure."""

    def __init__(self, number: signal.Signals, world: World) -> None:
        # 128 + number is a shell's exit status for "ended by this signal". But srun and mpirun take such a status for a
        # failure and end the other ranks, and rank 0 may still have to requeue the job; torchrun would start all anew.
        quiet = world.launcher == "torchrun" or (world.rank and world.launcher != "submitit-local")
        super().__init__(0 if quiet else 128 + number)


class Attempt:
    """This rank's share of an attempt."""

    def __init__(self, config: Config, run: RunDir, world: World, signals: Signals) -> None:
        self.config = config
        self.run_dir = run
        self.world = world
        self.signals = signals
        self.phases = StartupTimer()
        self.store = CheckpointStore(run.checkpoints)
        self.grace_s = config.launch.grace_s
        self.start_step = 0
        self.group: Group | None = None
        self.stop: Stop | None = None
        self.loop: Loop | None = None
        self._fault: Fault | None = None
        self._failure: Fault | None = None  # of this rank itself
        self._main_is_out = threading.Event()
        self._over = threading.Event()  # an end by fault is done, as far as this rank is concerned
        self.watch = Watchdog(world, config.launch.hang_timeout_s, self._on_fault)
        self.watch.grace_over = self._grace_over
        self.watch.given_up = lambda: given_up(run.rescues / world.attempt)
        # Ends the threads that use the store. One that came out of torch's C++ while Python shuts down would abort the
        # process (Python before 3.14).
        self.closing = contextlib.ExitStack()
        self.closing.callback(self.watch.close)

    def run(self) -> dict[str, float]:
        """Train to the end and return the metrics of the last epoch.

        Raises Stopped when a signal ended the attempt before the run was done, SystemExit when it failed and is
        requeued, or whatever made it fail.
        """
        say(f"attempt begins on {time.strftime('%Y-%m-%d')}: {self.world}")
        newest: Manifest | None = None  # rank 0 looks for all: what the others see of a shared disk may lag
        try:
            if self.world.rank == 0:
                run_lock.acquire(self.run_dir.lock, self.world)
                self.store.recover()
                shutil.rmtree(self.run_dir.rescues, ignore_errors=True)
                newest = self.store.newest(warn=say)
                self.start_step = newest.step if newest else 0
                number = begin_attempt(self.run_dir, self.world, self.start_step)["attempt"]
                self.world = replace(self.world, number=number)
                self.phases.done("checking checkpoints")
            compiler.keep_in(self.run_dir.compiled) if self.config.train.compile else compiler.leave_out()
            # Here and not above, so that a signal during the seconds of importing torch is caught too.
            from trainer.loops.loop import AttemptContext
            from trainer.loops.run import make_custom_loop
            from trainer.loops.task_loop import TaskLoop
            from trainer.task import find_task
            from trainer.world.join import join
            from trainer.world.stop import Stop

            self.phases.done("importing torch")
            hang_timeout_s = self.config.launch.hang_timeout_s
            nccl.set_defaults(self.run_dir.collectives(self.world.attempt), hang_timeout_s)
            self.group = join(self.config, self.world, self.run_dir.meeting(self.world.attempt), hang_timeout_s)
            self.watch.join(self.group)
            self.group.connect(hang_timeout_s)
            number = self.group.broadcast_int("attempt", self.world.number)
            self.world = self.group.world = self.watch.world = replace(self.group.world, number=number)
            alarm = lambda why: self.watch.report(Fault("failed", why, cause=False))  # noqa: E731
            self.stop = Stop(self.world, self.group.store, self.signals, alarm)
            self.closing.callback(self.stop.close)
            self.watch.ticks = lambda: self.stop.tick if self.stop else 0
            self.phases.done("meeting")
            if self.grace_s is None and self.world.on_slurm:  # of a job that launch.py has not submitted
                self.grace_s = self.group.broadcast_int("grace", kill_wait_s() if self.world.rank == 0 else None)
            told = self.group.broadcast_int("step", newest.step if newest else None)
            self.start_step = told or 0
            means = AttemptContext(
                self.config, self.run_dir, self.group, self.stop, self.watch, self.phases, self.closing
            )
            work = find_task(self.config)
            self.loop = TaskLoop(work, means) if isinstance(work, type) else make_custom_loop(work, means)
            self.loop.restore(told)
            finished = self.loop.run()
        except Exception as error:
            self._fail(error)
            raise
        return self._leave(self.loop, self.group, finished)

    def _leave(self, loop: Loop, group: Group, finished: bool) -> dict[str, float]:
        """The orderly end: everything is saved. Rank 0 records it before anything else, and waits for nobody."""
        self.watch.close()
        step = loop.position.step
        record, requeue = None, False
        if self.world.rank == 0:
            reason, requeue, why = ("finished", False, None) if finished else self._ending()
            record = self._end(reason, step, step, lost_s=0.0, error=why)
        self.closing.close()
        group.close()
        if finished:
            loop.tensorboard.complete()
            loop.progress.finished(loop.position.metrics)
            return loop.position.metrics
        if requeue:
            self._requeue(record, self.signals.requeue)
        raise Stopped(self._signal(), self.world)

    def _signal(self) -> signal.Signals:
        """What stops this attempt, the same on every rank once they have agreed."""
        number = (self.stop.signal if self.stop else None) or self.signals.first
        assert number is not None
        return number

    def _ending(self) -> Ending:
        return ending(self._signal(), self.world, self.config.launch.signal_delay_s)

    def _requeue(self, record: AttemptRecord | None, handler: Callable[[], None] | None = None) -> None:
        """Put the job, whose attempt ended as recorded, back into the queue; `handler` is submitit's way to."""
        try:
            if handler is not None:
                handler()  # checkpoint(), scontrol requeue, SystemExit
            elif self.world.on_slurm and record is not None:
                if not record["requeue"]:
                    return say(f"not requeued: {spent(self.config.launch)}; {AGAIN}")
                scontrol("requeue", self.world.job_id)
                say(f"job {self.world.job_id} is requeued")
        except (OSError, subprocess.SubprocessError) as error:
            say(f"{error}; the batch shell tries again")
        except SlurmError as error:
            say(f"not requeued: {error}; {AGAIN}")

    def _fail(self, error: Exception) -> None:
        """The main thread came out with an error: tell the others, take part in the end, and then raise it."""
        host, rank = self.world.host_of(self.world.rank), self.world.rank
        # What is wrong with the configuration is on one line; of anything else the traceback tells.
        absent = isinstance(error, MeetingError)
        story = str(error) if absent or isinstance(error, ConfigError) else traceback.format_exc()[-20_000:]
        text = f"rank {rank} on {host} failed:\n{story}"
        if self.group is None:  # the others are not there to be told; they notice when they come to meet
            self.watch.close()
            start, again = self.start_step, not isinstance(error, ConfigError)
            self._end("failed", start, start, error=text, retry=again)
            self._advise(text)
            return
        from trainer.world.group import is_peer_loss

        self._main_is_out.set()
        if is_peer_loss(error) and not absent:
            fault = Fault("failed", f"rank {rank} on {host} lost contact: {error}", cause=False)
        else:
            # What fails while it prepares the data would fail again, and so would a gradient that is not finite.
            again = absent or (self.loop is not None and not isinstance(error, (ConfigError, ArithmeticError)))
            fault = self._failure = Fault("failed", text, retry=again)
        self.watch.report(fault)
        self._over.wait()
        _within(FAREWELL_S, self.closing.close)  # the store may answer no more
        record = record_of(self.run_dir, self.world)
        if record is not None and record["requeue"]:
            say(traceback.format_exc())
            # submitit would take any other exception for the end of the run and write it down as its result.
            raise SystemExit(1) from error

    def _on_fault(self, fault: Fault) -> None:
        """In a thread of its own, once."""
        self._fault = fault
        try:
            self._end_by_fault(fault)
        except BaseException:
            say(traceback.format_exc())
        finally:
            self._over.set()
        if not self._main_is_out.wait(COME_OUT_S):
            self._exit()

    def _end_by_fault(self, fault: Fault) -> None:
        """Keep the last whole step if any rank has it, and record how the attempt ended: one rank does, see rescue."""
        say(fault.text)
        if fault.reason in ("hung", "signal"):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        loop = self.loop
        patience_s = 0.0 if self._main_is_out.is_set() else FREEZE_S  # whoever is out of a step will not complete it
        step = loop.position.step if loop is not None and loop.freeze(patience_s) else -1
        here = Survivor(self.world.rank, step, self._failure)
        survivors = gather(self.run_dir.rescues / self.world.attempt, here, self.world.size)
        take_turns(
            survivors,
            self.world.rank,
            act=lambda: self._rescue(fault, survivors),
            done=lambda: record_of(self.run_dir, self.world) is not None,
        )

    def _rescue(self, fault: Fault, survivors: list[Survivor]) -> None:
        """Save and record for all."""
        loop = self.loop
        end_step = kept = max(self.start_step, loop.saves.saved.step if loop else 0)
        if loop is not None and survivors[0].step >= 0:
            end_step = loop.position.step
            kept = self._keep(loop, kept)
        reason: str = fault.reason
        error: str | None = explain(fault, survivors, self.world)
        requeue = True
        if fault.reason == "signal":
            reason, requeue, error = self._ending()
        retry = all(own.failure.retry for own in survivors if own.failure) and fault.retry
        record = self._end(reason, end_step, kept, error=error, retry=retry)
        if record is not None:
            lost = f"{record['lost_steps']} steps lost" if record["lost_steps"] else "no step lost"
            say(f"attempt ended ({reason}) after step {end_step}, {lost}")
            self._advise(error or "")
            # Submitit's batch shell sees to it, once srun has ended. But srun waits for ever for a rank that has ended
            # on a node which it could not hear at that moment. After a signal torchrun starts nothing.
            by_shell = self.world.by_submitit and fault.reason != "hung"
            by_torchrun = self.world.launcher_restarts and fault.reason != "signal"
            if requeue and record["requeue"] and not (by_shell or by_torchrun):
                self._requeue(record)

    def _keep(self, loop: Loop, kept: int) -> int:
        """Save the last whole step; returns the step that is kept now."""
        step = loop.position.step
        if loop.saves.saving is not None and loop.saves.saving.step == step:
            with contextlib.suppress(RuntimeError):
                loop.saves.wait(COME_OUT_S)  # all ranks may be alive, and just about to have it
        if step == kept or self.store.stands(step):
            return step
        if not run_lock.still_ours(self.run_dir.lock, self.world):
            say(f"another attempt is at work on this run; the checkpoint of step {kept} stands")
            return kept
        try:
            loop.save_alone(tag=f"rescue-{self.world.rank}")
        except (CheckpointError, OSError) as error:
            say(f"WARNING: {error}; the checkpoint of step {kept} stands")
            return kept
        say(f"rank {self.world.rank} saved step {step} alone")
        return step

    def _end(self, reason: str, end_step: int, kept_step: int, **more: Any) -> AttemptRecord | None:
        """Record the end, see `end_attempt`."""
        step_s = self.loop.progress.step_s() if self.loop else None
        return end_attempt(
            self.run_dir, self.world, self.config.launch, reason, end_step, kept_step, step_s=step_s, **more
        )

    def _advise(self, error: str) -> None:
        """Say what is most likely behind an error, and what to try."""
        if hint := likely_cause(error, self.config, self.world):
            say(hint)

    def _grace_over(self) -> Fault | None:
        """Looked at every half second: whether a signal came too long ago to wait for the agreed step any longer."""
        noticed = self.stop.noticed_at if self.stop else None
        since = [moment for moment in (noticed, self.signals.first_at) if moment is not None]
        if not since:
            return None
        grace_s = self.grace_s or DEFAULT_GRACE_S
        if self._signal() in USER_SIGNALS:
            grace_s = self.config.launch.signal_delay_s
        passed = time.monotonic() - min(since)
        if passed > grace_s - LAST_MOMENT_S:
            self._end_now()
        if passed > grace_s / 2 and not (self.loop and self.loop.saves.last):
            return Fault("signal", f"{passed:.0f} s after the signal the step has not ended; not waiting for it")
        return None

    def _end_now(self) -> None:
        """The last moment: whatever is still being written comes too late."""

        def record() -> None:
            loop = self.loop
            done, kept = (loop.position.step, loop.saves.saved.step) if loop else (self.start_step, self.start_step)
            reason = self._fault.reason if self._fault and self._fault.reason != "signal" else "preempted"
            self._end(reason, done, kept)

        say("the grace is over; the newest checkpoint stands")
        _within(LAST_MOMENT_S / 2, record)  # the disk may be what everything waits for
        self._exit()

    def _exit(self) -> None:
        """End this process although its main thread cannot."""
        flush_output()
        os._exit(1)


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Call it in a thread, and wait for that no longer."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)

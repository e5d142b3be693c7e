"""The end by fault: a rank died or is stuck, or the grace period after a signal is running out.

Each surviving rank takes part in a separate thread, since its main thread may be waiting for a dead rank, in C.
The thread freezes the state of the last finished step, agrees with the other survivors on who saves it
(trainer/attempt/rescue.py), and that rank records how the attempt ended. Then the process exits, whatever its main
thread is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.attempt.ending import EndReason, ending_by_signal, print_hint, record_end, requeue
from trainer.attempt.grace import LAST_MOMENT_S, GracePeriod
from trainer.attempt.rescue import Survivor, explain, find_survivors, take_turns
from trainer.attempt.state import AttemptState
from trainer.checkpoint.store import CheckpointError
from trainer.records.attempts import find_record
from trainer.say import counted, flush_output, say
from trainer.world import run_lock
from trainer.world.watchdog import Fault

if TYPE_CHECKING:
    from trainer.loops.loop import Loop

# How long a main thread in the middle of an update may take to complete it.
FREEZE_S = 10.0
# How long a save that all ranks write together may still take to be committed.
COMMIT_S = 2.0
# How long the main thread may take to fail by itself before the process exits.
MAIN_THREAD_S = 2.0
# Rank 0 looks every this many checks of the watchdog, so every 5 s, whether the run's folder is still there.
CHECKS_PER_LOOK = 10


class EndByFault:
    """This rank's part in the end by fault."""

    def __init__(self, state: AttemptState, grace: GracePeriod) -> None:
        self._state = state
        self._grace = grace
        self._fault: Fault | None = None
        self._own_failure: Fault | None = None
        self._main_thread_failed = threading.Event()
        self._done = threading.Event()
        self._checks = 0

    def main_thread_failed(self) -> None:
        """The main thread has left its step for good: an update that it had begun will not be completed."""
        self._main_thread_failed.set()

    def set_own_failure(self, fault: Fault) -> None:
        """This rank itself failed. Call before the fault is reported: the record of the attempt names its cause."""
        self._own_failure = fault

    def is_about(self, fault: Fault) -> bool:
        """Whether this fault, not an earlier one, ends the attempt; then it is in the log. Call after `wait`."""
        return self._fault is fault

    def wait(self) -> None:
        """Wait until this rank's part is done."""
        self._done.wait()

    def run(self, fault: Fault) -> None:
        """Save and record what can be, then exit unless the main thread fails by itself. Runs in a separate thread."""
        self._fault = fault
        try:
            if self._state.run_dir.is_gone():
                say(self._gone())  # there is nowhere to save anything
            else:
                self.take_part(fault)
        except BaseException:
            say(traceback.format_exc())
        finally:
            self._done.set()
        if not self._main_thread_failed.wait(MAIN_THREAD_S):
            _exit()

    def check(self) -> Fault | None:
        """What ends the attempt although no rank has failed; the watchdog calls this twice a second.

        Exits when the grace period after a signal is over.
        """
        return self._check_grace() or self._check_folder()

    def _check_folder(self) -> Fault | None:
        """Whether the user has deleted or moved the run. No verb would find it, yet it would hold its nodes."""
        self._checks += 1
        if self._state.world.rank == 0 and self._checks % CHECKS_PER_LOOK == 0 and self._state.run_dir.is_gone():
            return Fault("failed", self._gone(), retry=False)
        return None

    def _gone(self) -> str:
        return f"{self._state.run_dir.path} was deleted or moved while the run trained: the attempt ends"

    def _check_grace(self) -> Fault | None:
        """Whether the grace period leaves no time to wait for the agreed last step."""
        number, signalled_at = self._state.signal, self._state.signalled_at
        if number is None or signalled_at is None:
            return None
        passed_s = time.monotonic() - signalled_at
        if self._grace.is_over(number, passed_s):
            self._exit_at_last_moment()
        in_last_save = self._state.loop is not None and self._state.loop.saves.last
        if self._grace.gives_up_step(number, passed_s) and not in_last_save:
            return Fault("signal", f"the step has not finished {passed_s:.0f} s after the signal; giving it up")
        return None

    def take_part(self, fault: Fault) -> None:
        """Save the last finished step if any rank has it, and record the end. One rank does both, see take_turns."""
        state = self._state
        own = fault is self._own_failure
        # Rank 0's log, which is on the terminal, has every error in full; the others have their own.
        say(fault.text if own or not state.world.rank else _in_one_line(fault.text))
        if fault.reason in ("hung", "signal"):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        here = Survivor(state.world.rank, self._frozen_step(), self._own_failure)
        survivors = find_survivors(state.run_dir.rescues / state.world.attempt, here, state.world.size)
        take_turns(
            survivors,
            state.world.rank,
            act=lambda: self._act_for_all(fault, survivors, here),
            done=lambda: find_record(state.run_dir, state.world) is not None,
        )

    def _frozen_step(self) -> int:
        """Freeze the state of the last finished step; returns that step, -1 if this rank has no whole state."""
        # A main thread that has failed will not complete its update, so waiting for that would be in vain.
        timeout_s = 0.0 if self._main_thread_failed.is_set() else FREEZE_S
        loop = self._state.loop
        try:
            return loop.position.step if loop is not None and loop.freeze(timeout_s) else -1
        except Exception:  # such as a CUDA error, which every later call repeats
            say(f"WARNING: this rank cannot save its state:\n{traceback.format_exc()}")
            return -1

    def _act_for_all(self, fault: Fault, survivors: list[Survivor], here: Survivor) -> None:
        """Save the state, record the end and requeue the job, for all ranks."""
        state = self._state
        loop = state.loop
        end_step = saved_step = max(state.start_step, loop.saves.saved.step if loop else 0)
        # This rank's own state may be torn, although a better survivor, which has died since, had a whole one.
        if loop is not None and here.step >= 0:
            saved_step = self._save_alone(loop, saved_step)
            end_step = loop.position.step  # a GPU may have done another step meanwhile
        error: str | None = explain(fault, survivors, state.world)
        reason: EndReason
        if fault.reason == "signal":
            reason, wants_requeue, error = ending_by_signal(state)
        else:
            reason, wants_requeue = fault.reason, True
        retry = all(survivor.failure.retry for survivor in survivors if survivor.failure) and fault.retry
        record = record_end(state, reason, end_step, saved_step, error=error, retry=retry)
        if record is not None:
            lost = f"{counted(record['lost_steps'], 'step')} lost" if record["lost_steps"] else "no step lost"
            say(f"attempt ended ({reason}) after step {end_step}, {lost}")
            print_hint(state, error or "")
            # Submitit's batch shell requeues once srun has ended. But after a hang srun may never end: it waits forever
            # for a rank that ended on a node which it could not reach at that moment. After a signal torchrun does not
            # restart anything.
            by_shell = state.world.by_submitit and fault.reason != "hung"
            by_torchrun = state.world.launcher_restarts and fault.reason != "signal"
            if wants_requeue and record["requeue"] and not (by_shell or by_torchrun):
                requeue(state, record)

    def _save_alone(self, loop: Loop, saved_step: int) -> int:
        """Save the frozen step unless it is saved already; returns the newest saved step."""
        state = self._state
        step = loop.position.step
        if loop.saves.saving is not None and loop.saves.saving.step == step:
            with contextlib.suppress(RuntimeError):
                loop.saves.wait(COMMIT_S)  # all ranks may be alive, and about to commit it
        if step == saved_step or state.store.is_intact(step):
            return step
        if not run_lock.still_ours(state.run_dir.lock, state.world):
            say(f"step {step} is not saved, since another attempt is working on this run; step {saved_step} is")
            return saved_step
        try:
            loop.save_alone(tag=f"rescue-{state.world.rank}")
        except (CheckpointError, OSError) as error:
            say(f"WARNING: {error}; the newest checkpoint is that of step {saved_step}")
            return saved_step
        step = loop.position.step
        say(f"rank {state.world.rank} saved step {step} alone")
        return step

    def _exit_at_last_moment(self) -> None:
        """Record the end and exit. Whatever is still being written would not be complete before SIGKILL."""

        def record() -> None:
            state = self._state
            loop = state.loop
            end_step, saved_step = (
                (loop.position.step, loop.saves.saved.step) if loop else (state.start_step, state.start_step)
            )
            fault = self._fault
            record_end(state, fault.reason if fault and fault.reason != "signal" else "preempted", end_step, saved_step)

        say("no time left to save: the run will resume from its newest checkpoint")
        run_for(LAST_MOMENT_S / 2, record)  # in a thread: the disk may be what everything waits for
        _exit()


def _in_one_line(text: str) -> str:
    """A fault's text, of an error with its traceback only what is above and below that."""
    lines = text.strip().splitlines()
    return " ".join(lines if len(lines) < 3 else (lines[0], lines[-1]))


def run_for(timeout_s: float, work: Callable[[], None]) -> None:
    """Call `work` in a thread, and stop waiting for it after `timeout_s`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)


def _exit() -> None:
    """End this process although its main thread cannot."""
    flush_output()
    os._exit(1)

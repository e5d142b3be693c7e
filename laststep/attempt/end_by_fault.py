"""The end by fault: a rank died or is stuck, or the grace period after a signal is running out.

Each surviving rank takes part in a separate thread, since its main thread may be waiting for a dead rank, in C.
The thread freezes the state of the last finished step and saves it together with the other survivors
(laststep/attempt/rescue.py); one of them records how the attempt ended. Then the process exits, whatever its main
thread is doing, and also when the thread itself gets nothing done any more.
"""

from __future__ import annotations

import threading
import time
import traceback

from laststep.attempt.deadline import exit_now, print_stacks, run_for
from laststep.attempt.ending import EndReason, record_end, requeue
from laststep.attempt.grace import LAST_MOMENT_S, GracePeriod
from laststep.attempt.rescue import Rescue
from laststep.attempt.rescue_cause import has_ended
from laststep.attempt.rescue_files import exit_status, has_begun
from laststep.attempt.rescuer import Rescuer
from laststep.attempt.state import AttemptState
from laststep.ranks.fresh_view import FreshView
from laststep.ranks.neighbour import Neighbour
from laststep.ranks.process import start_thread
from laststep.ranks.seal import Seal
from laststep.ranks.watchdog import Fault, FaultReason
from laststep.records.attempts import find_record
from laststep.say import say

# How long this rank stays in a rescue in which no survivor gets anything done, for example because the disk hangs.
STALLED_S = 60.0
# How long the main thread may take to fail by itself before the process exits, where collectives fail.
MAIN_THREAD_S = 2.0
POLL_S = 0.5
# Rank 0 looks every this many checks of the watchdog, so every 5 s, whether the run's folder is still there.
CHECKS_PER_LOOK = 10


class EndByFault:
    """This rank's part in the end by fault."""

    def __init__(self, state: AttemptState, grace: GracePeriod) -> None:
        self._state = state
        self._grace = grace
        self._fault: Fault | None = None
        self._own_failure: Fault | None = None
        self._says_own = True
        self._main_thread_failed = threading.Event()
        self._done = threading.Event()
        self._rescue: Rescue | None = None
        self._rescuer: Rescuer | None = None
        self._checks = 0
        self._neighbour: Neighbour | None = None
        self._has_met = False
        world = state.world
        self._folder = state.run_dir.rescues / world.attempt
        self._view = FreshView(world.size, self._folder)

    def main_thread_failed(self) -> None:
        """The main thread has left its step for good: an update that it had begun will not be completed."""
        self._main_thread_failed.set()

    def set_own_failure(self, fault: Fault, to_say: bool) -> None:
        """This rank itself failed. Call before the fault is reported: the record of the attempt names its cause, and
        so does the log if it is `to_say`."""
        self._own_failure, self._says_own = fault, to_say

    def is_about(self, fault: Fault) -> bool:
        """Whether this fault, not an earlier one, ends the attempt; then it is in the log. Call after `wait`."""
        return self._fault is fault

    def wait(self) -> None:
        """Wait until this rank's part is done."""
        self._done.wait()

    def run(self, fault: Fault) -> None:
        """Save and record what can be, then exit unless the main thread fails by itself. Runs in a separate thread."""
        self._fault = fault
        worker = threading.Thread(target=self._try_to_take_part, args=(fault,), name="rescuer", daemon=True)
        start_thread(worker)
        stalled_s, progress = 0.0, -1
        while worker.is_alive() and stalled_s < STALLED_S:  # counted in rounds, so not while the process is suspended
            worker.join(POLL_S)
            before, progress = progress, self._rescue.progress if self._rescue else -1
            stalled_s = stalled_s + POLL_S if progress == before else 0.0
        if worker.is_alive():
            say(f"no rank has got anything done for {STALLED_S:.0f} s: exiting; the newest checkpoint stands")
            print_stacks()
        self._done.set()
        group = self._state.group
        waits_in_vain = group is not None and group.world.size > 1 and not group.fails_with_peers
        if not self._main_thread_failed.wait(0.0 if waits_in_vain else MAIN_THREAD_S):
            exit_now()

    def _try_to_take_part(self, fault: Fault) -> None:
        try:
            if self._state.run_dir.is_gone():
                say(self._gone())  # there is nowhere to save anything
            else:
                self.take_part(fault)
        except BaseException:
            say(traceback.format_exc())

    def check(self) -> Fault | None:
        """What ends the attempt although no rank has failed; the watchdog calls this twice a second.

        Exits when the grace period after a signal is over.
        """
        try:
            return self._check_grace() or self._check_folder() or self._check_gone() or self._check_neighbour()
        except OSError:  # of the file system that the ranks share: it may answer half a second later
            return None

    def others_gave_up(self) -> bool:
        """Whether another rank has begun its end by fault, and so given up on the others."""
        self._view.refresh()
        return has_begun(self._folder)

    def close(self) -> None:
        """The attempt is over."""
        self._grace.close()
        if self._neighbour is not None:
            self._neighbour.close()

    def _check_folder(self) -> Fault | None:
        """Whether the user has deleted or moved the run. No verb would find it, yet it would hold its nodes."""
        self._checks += 1
        if self._state.world.rank == 0 and self._checks % CHECKS_PER_LOOK == 0 and self._state.run_dir.is_gone():
            return Fault("failed", self._gone(), retry="no")
        return None

    def of_death(self, rank: int) -> Fault:
        """What the death of a rank is to the others. A stop signal may have killed it."""
        reason: FaultReason = "signal" if self._state.signal else "failed"
        return Fault(reason, has_ended(rank, self._state.world), cause=False)

    def _check_gone(self) -> Fault | None:
        """On rank 0: whether a supervisor says that its rank was killed. Before the ranks have met nothing else shows
        that. A rank that has failed by itself records the end. Not before the attempt's beginning is recorded: its end
        could not be."""
        state, world = self._state, self._state.world
        if world.rank or world.number is None:
            return None
        saves_last = state.loop is not None and state.loop.saves.last
        if not self._has_met or state.signal or saves_last:  # SIGKILL may come soon; else a lifeline shows it
            self._view.refresh()
        if not self._folder.exists():
            return None
        killed = (rank for rank in range(1, world.size) if (exit_status(self._folder, rank) or 0) < 0)
        return next(map(self.of_death, killed), None)

    def _check_neighbour(self) -> Fault | None:
        """Whether the host of another node is dead. From the first tick on, when the ranks have met."""
        state = self._state
        if not self._has_met and state.ticks:
            self._has_met = True
            self._neighbour = Neighbour.of(state.world, lambda: state.ticks)
        if self._neighbour is not None and self._neighbour.is_dead:
            host = self._neighbour.host
            return Fault("hung", f"{host} does not answer: it has lost power or its network", silent=True, blames=host)
        return None

    def _gone(self) -> str:
        return f"{self._state.run_dir.path} was deleted or moved while the run trained: the attempt ends"

    def _check_grace(self) -> Fault | None:
        """Whether the grace period leaves no time to wait for the agreed last step."""
        signalled_at = self._state.signalled_at
        if self._state.signal is None or signalled_at is None:
            return None
        self._grace.follow()
        passed_s = time.monotonic() - signalled_at
        if self._grace.is_over():
            self._exit_at_last_moment()
        loop = self._state.loop
        in_last_save = loop is not None and loop.saves.last
        saves = loop is None or loop.rescuable
        if self._grace.gives_up_step(saves) and not in_last_save:
            return Fault("signal", f"the step has not finished {passed_s:.0f} s after the signal; giving it up")
        return None

    def take_part(self, fault: Fault) -> None:
        """Save the last finished step if any rank has it, and record the end."""
        state = self._state
        own = fault is self._own_failure
        # Rank 0's log, which is on the terminal, has every error in full; the others have their own.
        if self._says_own or not own:
            say(fault.text if own or not state.world.rank else _in_one_line(fault.text))
        if fault.reason in ("hung", "signal"):
            print_stacks()
        world = state.world
        seal = state.group.seal if state.group is not None else Seal()

        def is_recorded() -> bool:
            return find_record(state.run_dir, world) is not None

        rescue = Rescue(self._folder, world.rank, world.size, is_recorded, seal)
        rescue.sign_in(self._own_failure, began_step=state.ticks > 0)
        self._rescue = rescue
        rescue.start()
        try:
            rescuer = self._rescuer = Rescuer(state, fault, rescue, self._main_thread_failed.is_set)
            rescuer.announce()
            while (duty := rescue.next_duty()) is not None:
                rescuer.do(duty)
        finally:
            rescue.close()

    def _exit_at_last_moment(self) -> None:
        """Record the end and exit. Whatever is still being written would not be complete before SIGKILL."""

        state = self._state
        fault, cause, launch = self._fault, self._grace.cause, state.config.launch
        reason: EndReason = fault.reason if fault and fault.reason != "signal" else cause.reason
        advice = ""
        if reason == "timeout":
            advice = (
                f": raise launch.signal_delay_s (now {launch.signal_delay_s}), the time that a time limit leaves for "
                "the last save"
            )

        def record() -> None:
            loop = state.loop
            end_step, saved_step = (
                (loop.position.step, loop.saves.saved.step) if loop else (state.start_step, state.start_step)
            )
            silence = self._rescuer.silence if self._rescuer else ""
            unsaved = f"no time was left to save step {end_step}{advice}" if end_step > saved_step else ""
            error = "\n".join(filter(None, [cause.error, silence, unsaved]))
            ended = record_end(state, reason, end_step, saved_step, error=error or None)
            if ended is not None and cause.requeue and state.world.on_slurm:
                requeue(state, ended)  # SIGKILL may come before the batch shell gets to it

        say(f"no time left to save{advice}; the run will resume from its newest checkpoint")
        run_for(LAST_MOMENT_S / 2, record)  # in a thread: the disk may be what everything waits for
        exit_now()


def _in_one_line(text: str) -> str:
    """A fault's text, of an error with its traceback only what is above and below that."""
    lines = text.strip().splitlines()
    return " ".join(lines if len(lines) < 3 else (lines[0], lines[-1]))

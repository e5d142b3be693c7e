"""What the orderly end and the end by fault have in common: the attempt's state and record, the requeue, the hint."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NoReturn

from laststep.attempt.restart import USER_SIGNALS, Ending, ending, insist_on_requeue, revoked
from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.ranks.beside import BesideTraining
from laststep.ranks.disk import Patience
from laststep.ranks.fault import Retry
from laststep.ranks.launchers import BATCH_HOST, STEP_RESTARTS
from laststep.ranks.process import Alarm, Signals, start_thread
from laststep.ranks.slurm import BY_CHAIN, CHAIN_VARIABLE, SlurmError
from laststep.ranks.world import World, hostname
from laststep.records.attempt_record import AttemptRecord, EndedAttempt, read_ended_attempts
from laststep.records.attempts import correct, end_attempt
from laststep.records.progress import likely_cause
from laststep.records.retry import recorded
from laststep.rundir import RunDir
from laststep.say import counted, flush_output, say

if TYPE_CHECKING:
    from laststep.loops.engine import Engine
    from laststep.ranks.group import Group
    from laststep.ranks.stop import Stop

EndReason = Literal["finished", "failed", "hung", "preempted", "cancelled", "timeout"]
TOGETHER_S = 1.0  # signals that came before any could be caught are received within this time
SHELL_S = 15.0  # within which a batch shell that lives has killed srun, and so all ranks
# How long a rank tries to record the end on a disk that refuses. The orderly end takes 60 s at most, and in a rescue
# another rank may try.
INSIST_S = 20.0
# How long it insists on the requeue while Slurm does not answer. Everything is saved, and SIGKILL may come.
REQUEUE_S = 20.0
CONTINUE_BY_HAND = "start the run again under the same name to continue"


class AttemptState:
    """What this rank knows of its attempt so far; what needs torch is None until it exists.

    The main thread fills it in while the attempt starts. The watchdog and the end by fault read it from threads of
    their own, at any moment, so each field stays at its first value until it has its final one.
    """

    def __init__(self, config: Config, run_dir: RunDir, world: World, signals: Signals) -> None:
        self.config = config
        self.run_dir = run_dir
        self.signals = signals
        self.store = CheckpointStore(run_dir.checkpoints)
        self.start_step = 0  # of the checkpoint that this attempt resumes from
        self.group: Group | None = None
        self.stop: Stop | None = None
        self.engine: Engine | None = None
        self._launched = world
        self.beside = BesideTraining(config, run_dir, world)

    @property
    def world(self) -> World:
        """This rank's place: the group's, which knows every host, once there is a group; else the launcher's."""
        return self._launched if self.group is None else self.group.world

    def set_number(self, number: int | None) -> None:
        """Set the attempt's number within its run: on rank 0 before the ranks meet, on the others as they do."""
        world = replace(self.world, number=number)
        if self.group is None:
            self._launched = world
        else:
            self.group.world = world

    @property
    def ticks(self) -> int:
        """Units of work begun so far, see `Stop`."""
        return self.stop.tick if self.stop else 0

    @property
    def cause_signal(self) -> signal.Signals | None:
        """The signal that says why this attempt stops. A SIGINT is the user's word, also after another signal. Of those
        that had come before this process could catch any, the kernel delivers SIGTERM first: but srun sends it once a
        warning has killed a rank that was starting."""
        received, began = self.signals.received, self.signals.first_at or 0.0
        if any(number == signal.SIGINT for number, _ in received):
            return signal.SIGINT
        warnings = (number for number, at in received if number in USER_SIGNALS and at < began + TOGETHER_S)
        return next(warnings, self.signal)

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that stops this attempt, if any; the same on every rank once they have agreed on a last step."""
        return (self.stop.signal if self.stop else None) or self.signals.first

    @property
    def signalled_at(self) -> float | None:
        """time.monotonic() of the first signal known to this rank, its own or another rank's."""
        noticed_at = self.stop.noticed_at if self.stop else None
        return min((moment for moment in (noticed_at, self.signals.first_at) if moment is not None), default=None)


def record_end(
    state: AttemptState,
    reason: EndReason,
    end_step: int,
    saved_step: int,
    lost_s: float | None = None,
    error: str | None = None,
    retry: Retry = "yes",
    blamed: Sequence[str] = (),
) -> AttemptRecord | None:
    """Record how this attempt ended, see `end_attempt`; None if another rank was first. A run that its user has
    cancelled must not start again, whatever befell it while it stopped: it is recorded as cancelled."""
    if reason != "finished" and state.cause_signal == signal.SIGINT:
        reason = "cancelled"
    step_s, save_s = None, None
    if state.engine is not None:
        save_s = state.engine.saves.stalled_s
        step_s = state.engine.progress.step_s() if state.engine.progress.steps else None
    record = end_attempt(
        state.run_dir,
        state.world,
        state.config.launch,
        reason,
        end_step,
        saved_step,
        lost_s=lost_s,
        step_s=step_s,
        save_s=save_s,
        error=error,
        retry=retry,
        blamed=blamed,
        patience=Patience(INSIST_S, say),
    )
    if record is not None:
        state.beside.ended(record)
    return record


def ending_by_signal(state: AttemptState) -> Ending:
    """Why the signal came that stops this attempt, and whether we must requeue the job. Asks Slurm."""
    # Another rank may have reported a signal that this one has not read yet.
    return ending(state.cause_signal or signal.SIGTERM, state.world, state.config.launch.signal_delay_s)


def requeue(state: AttemptState, record: AttemptRecord | None, handler: Callable[[], None] | None = None) -> None:
    """Requeue the job whose attempt ended as recorded, unless another one follows it (launch.chain), or the run has
    been cancelled since: the ranks may have taken seconds to part. `handler` is submitit's own way to requeue, where
    there is one. Raises SystemExit from within `handler`."""
    lost = record["lost_steps"] if record is not None else 0
    by_hand = f"{counted(lost, 'step')} lost" if lost else "every step is saved"
    by_hand = f"{by_hand}, {CONTINUE_BY_HAND}"
    if state.cause_signal is not None and (since := revoked(state.cause_signal, state.world)) is not None:
        if since.reason == "preempted":
            return say(f"Slurm requeues job {state.world.job_id} by itself")
        say(f"not requeued: {since.error or 'the run was cancelled after its end was recorded'}; {by_hand}")
        return _record_as_cancelled(state, record) if since.reason == "cancelled" else None
    try:
        if record is not None and record["requeue"] and CHAIN_VARIABLE in os.environ:
            say(BY_CHAIN)
        elif handler is not None:
            handler()  # calls Trainer.checkpoint and scontrol requeue, then raises SystemExit
        elif state.world.on_slurm and record is not None:
            if not record["requeue"]:
                why = recorded(read_ended_attempts(state.run_dir.attempts), state.config.launch).why
                return say(f"not requeued: {why}; {by_hand}")
            insist_on_requeue(state.world, REQUEUE_S)
            say(f"requeued job {state.world.job_id}")
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{error}; the batch shell tries again")
    except SlurmError as error:
        say(f"not requeued: {error}; {by_hand}")


def _record_as_cancelled(state: AttemptState, record: AttemptRecord | None) -> None:
    """Correct the record of an attempt whose run was cancelled right after its end: else its job would start again."""
    if record is None or not record["reason"]:
        return
    corrected: EndedAttempt = {**record, "reason": "cancelled", "requeue": False}
    try:
        Patience(INSIST_S, say).insist(lambda: correct(state.run_dir, record, corrected))
    except OSError as error:
        say(f"WARNING: attempts.jsonl does not say that the run was cancelled: {error}")
    state.beside.ended(corrected, by_us=False)


def end_srun(state: AttemptState) -> bool:
    """After a fault of a node, in a job that chooses its nodes: ask the batch shell to end srun, which would wait for
    the ranks of a dead node. Returns whether it was asked."""
    if BATCH_HOST not in os.environ:
        return False
    try:
        state.run_dir.step_over(state.world.job_id).touch()
    except OSError as error:
        say(f"srun may wait for a dead node: {error}")
        return False
    return True


def shell_is_gone(blamed: Sequence[str]) -> bool:
    """Whether this process outlives `end_srun`: then the batch shell has died with its node. Slurm would not act,
    since a job that chooses its nodes outlives each of them."""
    host = os.environ[BATCH_HOST]
    if host not in blamed or host == hostname():
        return False
    time.sleep(SHELL_S)
    say(f"the batch shell on {host} has not ended this step within {SHELL_S:.0f} s: its node seems to be dead")
    return True


def print_hint(state: AttemptState, error: str) -> None:
    """Print the most likely cause of an error and what to try, if anything is known about it."""
    buffer_bytes = state.engine.saves.writer.buffer_bytes if state.engine else 0
    if hint := likely_cause(error, state.config, state.world, buffer_bytes):
        say(hint)


def run_for(timeout_s: float, work: Callable[[], None]) -> bool:
    """Call `work` in a thread, and stop waiting for it after `timeout_s`. Whether it ended."""
    thread = start_thread("limited", work)
    thread.join(timeout_s)
    return not thread.is_alive()


def exit_now(status: int = 1) -> NoReturn:
    """End this process although its main thread cannot."""
    flush_output()
    wake_supervisor()
    os._exit(status)


def wake_supervisor() -> None:
    """A supervisor that somebody has stopped (SIGSTOP) would not notice the end of this rank, its child, and hold the
    job. One that runs is not disturbed."""
    if STEP_RESTARTS in os.environ:
        with contextlib.suppress(OSError):  # it is dead, and what has taken its place is not ours
            os.kill(os.getppid(), signal.SIGCONT)


def print_stacks() -> None:
    """Print the stacks of all threads on stderr, which need not be a file: in a notebook it has no descriptor."""
    with contextlib.suppress(Exception):  # of a stream that somebody has closed or replaced: the end must not fail here
        try:
            faulthandler.dump_traceback(file=sys.stderr)
        except (AttributeError, OSError, ValueError):
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file=file)
                file.seek(0)
                sys.stderr.write(file.read())


class Deadline(Alarm):
    """Ends the process with `status`, unless `cancel` is called within `timeout_s`."""

    def __init__(self, timeout_s: float, status: int) -> None:
        self.status, self._timeout_s = status, timeout_s
        super().__init__(timeout_s, self._expire)

    def _expire(self) -> None:
        say(f"the end of this rank takes longer than {self._timeout_s:.0f} s; exiting with status {self.status}")
        print_stacks()
        exit_now(self.status)


class LastExit:
    """Ends the process right before Python would destroy its objects, among them one that hangs. By then the launcher
    has written the result, and the user's own handlers have run."""

    def __init__(self) -> None:
        self.needed = False
        self.status = 0
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self.needed:  # an exception may have come after `status` was set
            exit_now(1 if getattr(sys, "last_value", None) is not None else self.status)

"""The grace period: how long a rank lives after a stop signal, and what there is still time for.

Only a signal that is followed by SIGKILL sets a deadline:

    in a Slurm job, SIGTERM            KillWait after it
    the first one of a GraceTime       KillWait after the end of the GraceTime, which is the job's EndTime then
    any signal                         KillWait after the time limit: after EndTime, and OverTimeLimit
    under torchrun, any signal         launch.grace_s after it, 30 s by default
    mpirun: SIGTERM, SIGINT            the same
    other clusters: SIGTERM            the same
    --local, or none of these          none; SIGTERM has one if launch.grace_s is set, but not under --local

Rank 0 asks Slurm and tells the others through the store how many seconds are left. It asks again after each further
signal, and every ASK_S: a job that stops for its time limit may be preempted meanwhile, or get more time. EndTime is
compared with the controller's clock, so the clocks of the nodes need not be right. Without an answer SIGTERM counts as
above, and SIGKILL follows a warning (SIGUSR1, SIGUSR2) after `launch.signal_delay_s`.

A running job may be suspended: the clocks move on, and on its resume Slurm moves EndTime. So until Slurm has answered
again, which rank 0 asks at once, the deadline of a running job moves by the time in which this process could not run.
Slurm suspends no job that it has ended. There SIGKILL comes by the clock, even to a process that is stopped. A rank
that is alive after that moment was frozen together with whatever sends SIGKILL, as on a frozen machine: it has the time
left that it had before.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from laststep.attempt.ending import AttemptState
from laststep.attempt.restart import USER_SIGNALS, Ending, comes_back, judge, usual_ending
from laststep.config.schema import Launch
from laststep.ranks.process import SIGNALLED, Signals, paused_s, start_thread
from laststep.ranks.slurm import (
    DEFAULT_KILL_WAIT_S,
    NEVER,
    UNENDED,
    Job,
    KillLimits,
    kill_limits,
    show_job,
    unix_time,
)
from laststep.ranks.world import World
from laststep.say import say

if TYPE_CHECKING:
    import torch.distributed as dist

    from laststep.ranks.meeting import SealedStore


# This close to SIGKILL the attempt stops waiting for anything, and uses the time left to record how it ended.
LAST_MOMENT_S = 3.0
# An end by fault in which nothing is saved is over within this time.
UNSAVED_END_S = 10.0
ASK_S = 10.0
ASK_AGAIN_S = 60.0  # where Slurm has not answered, and nothing depends on it yet
POLL_S = 0.5
KEY = "grace/outlook"
# A deadline that comes nearer by less is the same deadline: Slurm's times are whole seconds.
SAME_S = 2.0
# A rank that could not run for this long asks Slurm again.
PAUSE_S = 2.0
# Launchers outside Slurm that kill, or are killed, some time after a SIGTERM.
KILLED_ELSEWHERE = ("torchrun", "mpirun", "env", "ray")


class Outlook(NamedTuple):
    """What rank 0 knows of a stop."""

    kill_at: float  # time.monotonic() of SIGKILL; NEVER: none follows
    cause: Ending
    moves: bool = False  # whether Slurm moves it when it suspends the job


def seconds_left(job: Job, restart: int, limits: KillLimits, now: float, since_term_s: float | None) -> float:
    """Seconds until SIGKILL, from the output of `scontrol show job` at `now`, by the controller's clock.
    `since_term_s`: since the SIGTERM with which Slurm has ended the job, or may have; None if there was none."""
    if comes_back(job, restart) or job.get("JobState") not in UNENDED:
        return limits.kill_wait_s - (since_term_s or 0.0)
    preempted = unix_time(job.get("PreemptTime", "")) < NEVER
    left_s = unix_time(job.get("EndTime", "")) + (0.0 if preempted else limits.over_s) + limits.kill_wait_s - now
    if since_term_s is not None and not preempted:  # srun may have sent it, which kills what does not end
        return min(left_s, limits.kill_wait_s - since_term_s)
    return left_s


class LimitWarning:
    """The warning before the time limit, if nobody has received it: rank 0 then sends it to itself. Slurm sends it
    once, to the ranks, and the batch shell may be about to start them again. Only in a job that launch.py has
    submitted: it has asked for that warning."""

    def __init__(self, world: World, launch: Launch, signals: Signals) -> None:
        self._job_id, self._delay_s, self._signals = world.job_id, launch.signal_delay_s, signals
        self._closed = threading.Event()
        if world.rank == 0 and world.launcher == "submitit-slurm":
            with contextlib.suppress(RuntimeError):  # no thread: Slurm's own warning will do
                self._thread = start_thread("limit", self._watch)

    def close(self) -> None:
        """The attempt is over."""
        self._closed.set()

    def _watch(self) -> None:
        if SIGNALLED in os.environ:
            return self._warn("the batch shell received a signal before it started the ranks")
        while not self._closed.is_set() and self._signals.first is None:
            if (job := show_job(self._job_id)) is None:
                self._closed.wait(ASK_AGAIN_S)
                continue
            left_s = unix_time(job.get("EndTime", "")) - time.time() - kill_limits().clock_ahead_s
            if left_s > self._delay_s:
                # Slurm's own warning comes before that. The limit may have been raised, or the job suspended.
                if left_s == NEVER or self._closed.wait(left_s - self._delay_s):
                    return
            elif self._signals.first is None:
                return self._warn(f"{left_s:.0f} s are left before the time limit, and no warning of Slurm has come")

    def _warn(self, why: str) -> None:
        say(f"{why}: stopping")
        os.kill(os.getpid(), signal.SIGUSR2)


class GracePeriod:
    """The time from a stop signal to SIGKILL on this rank, and its two deadlines."""

    def __init__(self, state: AttemptState) -> None:
        # From SIGTERM to SIGKILL. None until the cluster was asked: launch.py asks at submission, other launchers do
        # not.
        self.kill_wait_s: float | None = state.config.launch.grace_s
        self._state = state
        self._outlook: Outlook | None = None
        self._since = 0.0  # since when the deadline is the one that it is
        self._learned_at = 0.0  # when the question was asked that confirmed it last
        self._limits: KillLimits | None = None
        self._ran_at: float | None = None  # when Slurm said last that the job has not ended
        self._ended_at: float | None = None  # when Slurm ended it
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._round = 0  # of what rank 0 has said: an older one is a replay
        paused_s(time.monotonic())  # begin to count

    # --- what there is time for

    def seconds(self) -> float:
        """From the signal that set the deadline to SIGKILL; NEVER if none follows, or none was received."""
        since, kill_at = self._period()
        return kill_at - since

    def gives_up_step(self, saves: bool = True) -> bool:
        """Whether a step still running must be given up now, to leave time for saving the one before, or where nothing
        can be saved then, for recording the end."""
        now = time.monotonic()  # first: this process may be suspended between the two
        since, kill_at = self._period()
        half_s = (kill_at - since) / 2
        given_s = half_s if saves else max(half_s, kill_at - since - UNSAVED_END_S)
        return now - since > given_s

    def is_over(self) -> bool:
        """Whether it is too late to save anything."""
        now = time.monotonic()  # first: this process may be suspended between the two
        return now > self._period()[1] - LAST_MOMENT_S

    @property
    def cause(self) -> Ending:
        """Why the signal came, as far as this rank knows; Slurm is not asked now."""
        number = self._state.cause_signal or signal.SIGTERM
        return self._outlook.cause if self._outlook else usual_ending(number, self._state.world)

    # --- what is known

    def follow(self) -> None:
        """A stop signal was received: begin to ask Slurm, or rank 0. Call as often as you like."""
        if self._thread is None and self._state.world.on_slurm and not self._closed.is_set():
            with contextlib.suppress(RuntimeError):  # no thread: the next call tries again
                self._thread = start_thread("grace", self._follow)

    def close(self) -> None:
        """The attempt is over."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _period(self) -> tuple[float, float]:
        """Since when the deadline is known, and the deadline, as time.monotonic(); both moved by the time in which this
        process could not run, where that moves the deadline."""
        known = self._outlook
        usual = [
            _moved(at + self._usual_s(number), at, at, number in USER_SIGNALS and not self._launcher_kills)
            for number, at in self._received()
            if known is None or (number == signal.SIGTERM and at > self._learned_at)
        ]
        if known is not None:
            usual.append(_moved(known.kill_at, self._since, self._learned_at, known.moves))
        kill_at, since = min(usual, default=(NEVER, 0.0))
        return since, kill_at

    @property
    def _launcher_kills(self) -> bool:
        """Whether a launcher kills the ranks some time after any signal, also within a job."""
        return self._state.world.launcher in ("torchrun", "mpirun")

    def _received(self) -> list[tuple[signal.Signals, float]]:
        """The signals of this attempt that this rank knows of."""
        state = self._state
        agreed = [(state.signal, state.signalled_at)] if state.signal and state.signalled_at is not None else []
        return [*agreed, *state.signals.received]

    def _usual_s(self, number: signal.Signals) -> float:
        """From this signal to SIGKILL if Slurm does not say."""
        world, grace_s = self._state.world, self.kill_wait_s
        if world.launcher == "torchrun" or (world.launcher == "mpirun" and number == signal.SIGINT):
            return grace_s or DEFAULT_KILL_WAIT_S
        if number == signal.SIGINT:
            return NEVER
        if number in USER_SIGNALS:
            with_limit = world.on_slurm or (world.launcher == "submitit-local" and not world.supervised)
            return self._state.config.launch.signal_delay_s if with_limit else NEVER
        if world.on_slurm or world.launcher in KILLED_ELSEWHERE:
            return grace_s or DEFAULT_KILL_WAIT_S
        return NEVER if world.supervised else grace_s or NEVER

    def _follow(self) -> None:
        state, heard, asked_at, answered_at = self._state, 0, 0.0, 0.0
        store: dist.Store | SealedStore | None = None
        while not self._closed.is_set():
            is_due = time.monotonic() >= answered_at + ASK_S or paused_s(asked_at) > PAUSE_S
            if state.world.rank == 0 and (is_due or len(self._received()) != heard):
                heard, asked_at = len(self._received()), time.monotonic()
                self._ask(asked_at)
                answered_at = time.monotonic()
            if state.group is not None and state.group.world.size > 1 and not self._closed.is_set():
                try:
                    store = store or state.group.store.clone()  # a client serves one caller at a time
                    self._exchange(store)
                except Exception:  # the store is gone, and with it rank 0: what is known stays
                    return
            self._closed.wait(POLL_S)

    def _exchange(self, store: dist.Store | SealedStore) -> None:
        """Tell the other ranks what is known, or learn it from rank 0."""
        if self._state.world.rank == 0:
            if self._outlook is not None:
                self._round += 1
                now = time.monotonic()  # first: this process may be suspended between the two
                left_s = self._period()[1] - now
                store.set(KEY, json.dumps([self._round, left_s, self._outlook.cause, self._outlook.moves]))
        elif store.check([KEY]):
            asked_at = time.monotonic()
            number, left_s, cause, moves = json.loads(store.get(KEY))
            if number > self._round:
                self._round = number
                self._learn(Outlook(asked_at + left_s, Ending(*cause), moves), asked_at)

    def _ask(self, asked_at: float) -> None:
        """Ask Slurm why this attempt stops, and how long it lives. `asked_at`: time.monotonic() of now. A rank that is
        suspended meanwhile counts the answer from then, and asks again."""
        state, launch = self._state, self._state.config.launch
        job = show_job(state.world.job_id)
        if job is None or state.signal is None:
            return
        limits = self._limits
        if limits is None:
            limits = kill_limits(job.get("Partition", ""))
            if self.kill_wait_s is not None:
                limits = limits._replace(kill_wait_s=self.kill_wait_s)
            if paused_s(asked_at) > PAUSE_S:  # the clocks of Slurm and of this node were read at different times
                return
            self._limits = limits
        told_at, now = time.monotonic(), time.time() + limits.clock_ahead_s
        term_at = [at for number, at in self._received() if number == signal.SIGTERM]
        runs_on = job.get("JobState") in UNENDED and not comes_back(job, state.world.restart)
        if runs_on:
            self._ran_at = told_at
            # srun, which may have sent it, is suspended with its job.
            since_term_s = told_at - term_at[0] - paused_s(term_at[0]) if term_at else None
        else:
            if self._ended_at is None:  # by the newest SIGTERM, unless that was one to a job that ran on
                self._ended_at = max([*term_at[-1:], *([self._ran_at] if self._ran_at else [])], default=told_at)
            since_term_s = told_at - self._ended_at
            if since_term_s > limits.kill_wait_s:  # what sends SIGKILL was frozen, too
                since_term_s -= paused_s(self._ended_at)
        left_s = seconds_left(job, state.world.restart, limits, now, since_term_s)
        received = self._received() if self._launcher_kills else []
        own = [_moved(at + self._usual_s(number), at, at, False)[0] for number, at in received]
        cause = judge(state.cause_signal or state.signal, job, state.world.restart, launch.signal_delay_s, now)
        kill_at = min([told_at + left_s, *own])
        self._learn(Outlook(kill_at, cause, runs_on and kill_at not in own), asked_at)

    def _learn(self, outlook: Outlook, asked_at: float) -> None:
        known = self._outlook
        if known is None:
            self._since = self._state.signalled_at or asked_at
        elif outlook.kill_at < _moved(known.kill_at, self._since, self._learned_at, known.moves)[0] - SAME_S:
            self._since = time.monotonic()
        self._outlook, self._learned_at = outlook, asked_at


def _moved(kill_at: float, since: float, learned_at: float, moves: bool) -> tuple[float, float]:
    """A deadline that was learned at `learned_at`, and since when it holds, after the pauses of this process."""
    now = time.monotonic()
    if moves or now > kill_at:  # in the second case what sends SIGKILL was frozen, too
        return kill_at + paused_s(learned_at), since + paused_s(since)
    return kill_at, since

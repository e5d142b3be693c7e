"""The grace period: how long the ranks live after a stop signal, and what there is still time for."""

from __future__ import annotations

import signal

from trainer.attempt.signal_cause import USER_SIGNALS
from trainer.config.launch import Launch
from trainer.world.slurm import DEFAULT_KILL_WAIT_S

# This close to SIGKILL the attempt stops waiting for anything, and uses the time left to record how it ended.
LAST_MOMENT_S = 3.0
# An end by fault in which nothing is saved is over within this time.
UNSAVED_END_S = 10.0


class GracePeriod:
    """The time from a signal to SIGKILL, and its two deadlines."""

    def __init__(self, launch: Launch) -> None:
        # From SIGTERM to SIGKILL. None until the cluster was asked: launch.py asks at submission, other launchers do
        # not. Without an answer it is Slurm's default, also outside Slurm.
        self.kill_wait_s: float | None = launch.grace_s
        self._signal_delay_s = launch.signal_delay_s

    def seconds(self, number: signal.Signals) -> float:
        """From this signal to SIGKILL. SIGUSR1 and SIGUSR2 are warnings that come `launch.signal_delay_s` ahead."""
        if number in USER_SIGNALS:
            return self._signal_delay_s
        return self.kill_wait_s or DEFAULT_KILL_WAIT_S

    def gives_up_step(self, number: signal.Signals, passed_s: float, saves: bool = True) -> bool:
        """Whether a step still running must be given up now, to leave time for saving the one before. Where nothing
        can be saved then, it has more time: only the end is to be recorded."""
        half_s = self.seconds(number) / 2
        return passed_s > (half_s if saves else max(half_s, self.seconds(number) - UNSAVED_END_S))

    def is_over(self, number: signal.Signals, passed_s: float) -> bool:
        """Whether it is too late to save anything."""
        return passed_s > self.seconds(number) - LAST_MOMENT_S

"""`python -m trainer --spawn N`: N ranks on this machine by torch.multiprocessing, and a process that waits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from types import FrameType

from trainer.config.errors import ConfigError
from trainer.world.signals import STOP_SIGNALS

# How long the ranks that are left have, after one has ended, to notice, to save what they hold, and to leave.
GRACE_S = 60.0


def spawn(ranks: int, work: Callable[[], int]) -> int:
    """Call `work`, which can be pickled, in so many processes, and tell each who it is, see
    trainer.world.launchers.Spawn.

    Signals that ask for a stop are passed on. Returns 0, or the exit status of the first that failed. Raises the
    ConfigError that `work` raised.
    """
    if ranks < 1:
        raise ConfigError(f"--spawn {ranks}: must be at least 1")
    # Not above: who only hears what is wrong with the words waits for no torch.
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    pids: list[int] = []
    early: list[int] = []  # signals that came before there were ranks

    def forward(number: int, frame: FrameType | None = None) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if not pids:
            early.append(number)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    resource_tracker.ensure_running()  # now: it lets SIGINT and SIGTERM through when it starts
    # The signals stay blocked in the ranks until they are caught there, see Signals.catch.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    context = start_processes(_rank, (ranks, job, work), nprocs=ranks, join=False)
    assert context is not None
    pids += context.pids()
    for missed in early:
        forward(missed)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        while not context.join(grace_period=GRACE_S):
            pass
    except ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 1
    except ProcessRaisedException as error:
        kind, _, text = str(error).strip().splitlines()[-1].partition(": ")
        if kind.endswith(".ConfigError"):
            raise ConfigError(text) from None
        raise
    return 0


def _rank(rank: int, ranks: int, job: str, work: Callable[[], int]) -> None:
    os.environ |= {"LASTSTEP_RANK": str(rank), "LASTSTEP_WORLD_SIZE": str(ranks), "LASTSTEP_JOB": job}
    sys.exit(work())

"""`python -m trainer --spawn N`: N ranks on this machine by torch.multiprocessing, and a process that waits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from trainer.world.signals import STOPS

# How long the ranks that are left have, after one has ended, to notice, to save what they hold, and to leave.
GRACE_S = 60.0


def spawn(ranks: int, work: Callable[[], int]) -> int:
    """Call `work`, which can be pickled, in so many processes, and tell each who it is, see trainer.world.detect.Spawn.

    Signals that ask for a stop are passed on. Returns 0, or the exit status of the first that failed.
    """
    from torch.multiprocessing.spawn import (
        ProcessExitedException,
        start_processes,
    )  # not above: who only hears what is wrong with the words waits for no torch

    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    # The signals stay blocked in the ranks until they are caught there, see Signals.catch.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    context = start_processes(_rank, (ranks, job, work), nprocs=ranks, join=False)
    assert context is not None

    def forward(number: int, frame: FrameType | None) -> None:
        for process in context.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    for number in STOPS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        while not context.join(grace_period=GRACE_S):
            pass
    except ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 1
    return 0


def _rank(rank: int, ranks: int, job: str, work: Callable[[], int]) -> None:
    os.environ |= {"LASTSTEP_RANK": str(rank), "LASTSTEP_WORLD_SIZE": str(ranks), "LASTSTEP_JOB": job}
    sys.exit(work())

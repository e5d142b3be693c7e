"""`python -m trainer --spawn N`: N ranks on this machine, started by torch.multiprocessing."""

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

# After one rank has ended, the others have this long to notice, to save their state and to exit.
GRACE_S = 60.0


def spawn(ranks: int, work: Callable[[], int]) -> int:
    """Call `work`, which must be picklable, in this many processes, each with its rank in the environment, see
    trainer.world.launchers.Spawn.

    Signals that ask for a stop are forwarded. Returns 0, or the exit status of the first rank that failed. Raises the
    ConfigError that `work` raised.
    """
    if ranks < 1:
        raise ConfigError(f"--spawn {ranks}: must be at least 1")
    # Imported here, so that wrong words are refused without waiting for torch.
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    pids: list[int] = []
    early: list[int] = []  # signals that arrived before there were ranks

    def forward(number: int, frame: FrameType | None = None) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if not pids:
            early.append(number)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    resource_tracker.ensure_running()  # now, before blocking: its start unblocks SIGINT and SIGTERM
    # The signals stay blocked in the ranks until Signals.catch.
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

"""`python -m laststep --spawn N`: N ranks on this machine, started by torch.multiprocessing."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from laststep.config.errors import ConfigError
from laststep.ranks.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

# After one rank has ended, the others have this long to notice, to save their state and to exit.
GRACE_S = 60.0
REFUSED_S = 5.0  # instead of GRACE_S after a rank has refused the configuration: nothing has started then


def spawn(ranks: int, work: Callable[[], int]) -> int:
    """Call `work`, which must be picklable, in this many processes, each with its rank in the environment, see
    laststep.ranks.launchers.Spawn.

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
        done = False
        while not done:
            ended = wait(list(context.sentinels))
            for process in context.processes:
                if process.sentinel in ended:
                    process.join()  # its pipe is closed a moment before its exit status is known
            if refusal := _refusal(context):
                _kill_after(REFUSED_S, context)
                raise ConfigError(refusal)
            done = context.join(grace_period=GRACE_S)
    except ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 1
    except ProcessRaisedException:
        if refusal := _refusal(context):
            raise ConfigError(refusal) from None
        raise
    return 0


def _refusal(context: ProcessContext) -> str | None:
    """The message of the ConfigError that ended a rank, if one did."""
    for process, path in zip(context.processes, context.error_files):
        if process.exitcode is None or not os.path.exists(path):
            continue
        kind, _, text = str(pickle.loads(Path(path).read_bytes())).strip().splitlines()[-1].partition(": ")
        if kind.endswith(".ConfigError"):
            return text
    return None


def _kill_after(seconds: float, context: ProcessContext) -> None:
    """Kill the ranks that have not ended by themselves within this time."""
    deadline = time.monotonic() + seconds
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


def _rank(rank: int, ranks: int, job: str, work: Callable[[], int]) -> None:
    os.environ |= {"LASTSTEP_RANK": str(rank), "LASTSTEP_WORLD_SIZE": str(ranks), "LASTSTEP_JOB": job}
    sys.exit(work())

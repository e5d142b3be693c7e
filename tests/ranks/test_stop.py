"""Signals are caught while a run trains; the agreement on the last tick ends when it is no longer needed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from laststep.ranks.meeting import SealedStore
from laststep.ranks.process import Signals
from laststep.ranks.seal import Seal
from laststep.ranks.stop import Stop
from tests.support.project import DEADLINE_S, read_until, wait_until
from tests.support.records import a_world


@pytest.mark.parametrize("sealed", [False, True])
def test_it_does_not_wait_for_a_dead_rank_once_it_is_closed(sealed: bool) -> None:
    """srun sends SIGTERM to the other ranks when one is killed. They would stay for seconds after they have saved, and
    the ranks could not start again in the same allocation."""
    raw: dist.Store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    failures: list[str] = []
    stop = Stop(a_world(0, 2), SealedStore(raw, Seal()) if sealed else raw, Signals(), failures.append)
    stop._notify(signal.SIGTERM)
    wait_until(lambda: stop.signal is not None, "the rank's own notice was not read")
    began = time.monotonic()
    stop.close()
    assert time.monotonic() - began < 15 and not stop._thread.is_alive() and not failures


HOST = """
import asyncio, os, signal, threading
from laststep.ranks.process import Signals

async def main():
    arrived = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, arrived.set)

    async def is_noticed():
        arrived.clear()
        os.kill(os.getpid(), signal.SIGWINCH)
        await asyncio.wait_for(arrived.wait(), 60)

    before = os.listdir("/proc/self/fd"), threading.active_count()
    for _ in range(2):
        signals = Signals.catch()
        await is_noticed()
        stopped = threading.Event()
        signals.on_first(lambda number: stopped.set())
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.wait(60), "a signal to stop did not arrive"
        signals.release(process_ends=False)
        await is_noticed()
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == before, "descriptors or threads are left"

asyncio.run(main())
"""


def test_a_program_with_signals_of_its_own() -> None:
    """A notebook, or a server, trains a model between other work. asyncio waits for signals on the descriptor that we
    replace: while we train, and afterwards, it was deaf. Each training left a thread and two descriptors."""
    done = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


WAITS = """
import os, signal
from laststep.ranks.process import next_signal
held = {signal.SIGTERM, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, held)
print("waits", flush=True)
print(next_signal(held, 0.5), flush=True)  # meanwhile this process is stopped and continued
os.kill(os.getpid(), signal.SIGUSR2)
print(next_signal(held, 60), next_signal(held, 0))
"""


def test_a_wait_for_a_signal_while_suspended() -> None:
    """A supervisor waits for the signals of its rank. Python's own function returned a signal by any number when the
    process woke: the supervisor died of it, and with it the rank."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as waits:
        read_until(waits, "waits")
        waits.send_signal(signal.SIGSTOP)
        time.sleep(0.6)  # until the wait is over, by the clock
        waits.send_signal(signal.SIGCONT)
        said, _ = waits.communicate(timeout=DEADLINE_S)
    assert said.split() == ["None", str(int(signal.SIGUSR2)), "None"]

"""A rank whose code never releases the interpreter's lock is ended; one that was suspended is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laststep.ranks.process import identity
from tests.support.project import DEADLINE_S, read_until, wait_until

TIMEOUT_S = 1.4
RANK = f"""
import ctypes, faulthandler, os, sys, threading
from laststep.attempt.interpreter_watch import InterpreterWatch
faulthandler.enable()
watch = InterpreterWatch({TIMEOUT_S})
watch.sign(True)
print("watched by", watch._process, flush=True)
signs = threading.Event()
def sign():
    while not signs.wait(0.1):
        watch.sign(True)
threading.Thread(target=sign, daemon=True).start()
for line in sys.stdin:
    if line == "hold\\n":
        ctypes.PyDLL(None).pause()  # keeps the interpreter's lock
    if line == "download\\n":
        signs.set()
        watch.sign(False)
    print("still here", flush=True)
watch.close()
"""


class Rank:
    """A process of its own session, with the process that watches it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self.watcher = identity(int(read_until(self.process, "watched by").split()[-1]))

    def says(self, line: str) -> None:
        """Give the process an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def suspends(self, *numbers: signal.Signals) -> None:
        """Send signals to the rank, and to the one beside it as Slurm does."""
        for number in numbers:
            subprocess.run(["kill", f"-{number.value}", self.watcher.split()[0]], check=True)
            self.process.send_signal(number)

    def watcher_ends(self) -> None:
        """Wait until no process is left beside the rank."""
        pid = int(self.watcher.split()[0])
        wait_until(lambda: identity(pid) != self.watcher, "the process that watches the interpreter is left")


@pytest.fixture
def rank() -> Iterator[Rank]:
    started = Rank()
    with started.process:
        yield started
        started.process.kill()
    started.watcher_ends()


def test_a_suspended_process_trains_on(rank: Rank) -> None:
    """`scontrol suspend` stops all processes of a job, for hours perhaps. A timer that measures by a clock has run out
    when the rank wakes: it died, without a rescue. Nor may a process die that was stopped alone, by a debugger."""
    rank.suspends(signal.SIGSTOP)
    time.sleep(2 * TIMEOUT_S)  # what a clock would count
    rank.suspends(signal.SIGCONT)
    rank.process.send_signal(signal.SIGSTOP)
    time.sleep(2 * TIMEOUT_S)
    rank.process.send_signal(signal.SIGCONT)
    rank.says("work")
    read_until(rank.process, "still here")


def test_a_held_lock_ends_the_process(rank: Rank) -> None:
    """No Python thread can do that, so the allocation would be held until its time limit. The stacks name the line."""
    rank.says("hold")
    said, _ = rank.process.communicate(timeout=DEADLINE_S)
    assert rank.process.returncode == -signal.SIGABRT
    assert "its code holds the interpreter's lock" in said and 'File "<string>", line 15 in <module>' in said


def test_signals_and_downloads(rank: Rank) -> None:
    """Slurm sends the signals of a stop to all processes of a job: a rank that lost its watcher by them could hold the
    nodes. What has no timeout, such as a download, is not ended."""
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        subprocess.run(["kill", f"-{number.value}", rank.watcher.split()[0]], check=True)
    rank.says("download")
    time.sleep(2 * TIMEOUT_S)
    assert Path(f"/proc/{rank.watcher.split()[0]}").exists()
    rank.says("work")
    read_until(rank.process, "still here")
    assert rank.process.stdin is not None
    rank.process.stdin.close()
    assert rank.process.wait(DEADLINE_S) == 0

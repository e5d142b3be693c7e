"""`python -m trainer --spawn N`: the process that waits for the ranks, and the signals that it forwards to them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.project import PROJECT
from tests.support.ranks import reasons
from tests.support.terminal import LONG, ranks_of
from tests.support.waiting import DEADLINE_S
from trainer.rundir import RunDir


def test_a_stop_while_ranks_start(tmp_path: Path) -> None:
    """A rank needs seconds to start, and a preemption does not wait for that: it would kill the rank, and the attempt
    with it, where a stop was asked for. multiprocessing's own helper process lets SIGTERM through when it starts."""
    command = [sys.executable, "-m", "trainer", "--spawn", "2", "--name", "early", f"launch.root={tmp_path}", *LONG]
    spawner = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + DEADLINE_S
    while len(ranks_of(spawner)) < 3:  # the helper, and two ranks
        assert time.monotonic() < deadline and spawner.poll() is None, "no ranks"
        time.sleep(0.01)
    spawner.send_signal(signal.SIGTERM)
    said, _ = spawner.communicate(timeout=DEADLINE_S)
    assert spawner.returncode == 128 + signal.SIGTERM, said
    assert reasons(RunDir(tmp_path / "early")) == ["cancelled"], said

"""`python -m laststep --spawn N`: the process that waits for the ranks, and the signals that it forwards to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from laststep.rundir import RunDir
from tests.support.commands import LONG, children
from tests.support.project import DEADLINE_S, PROJECT
from tests.support.ranks import reasons


def test_a_stop_while_ranks_start(tmp_path: Path) -> None:
    """A rank needs seconds to start, and a preemption does not wait for that: it would kill the rank, and the attempt
    with it, where a stop was asked for."""
    command = [sys.executable, "-m", "laststep", "--spawn", "2", "--name", "early", f"launch.root={tmp_path}", *LONG]
    spawner = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + DEADLINE_S
    while len(children(spawner.pid)) < 2:
        assert time.monotonic() < deadline and spawner.poll() is None, "no ranks"
        time.sleep(0.01)
    spawner.send_signal(signal.SIGTERM)
    said, _ = spawner.communicate(timeout=DEADLINE_S)
    assert spawner.returncode == 128 + signal.SIGTERM, said
    assert reasons(RunDir(tmp_path / "early")) == ["cancelled"], said


REFUSING = """
import os, time
from laststep.submission import local
from laststep.config.errors import ConfigError

def work():
    if os.environ["LASTSTEP_RANK"] == "0":
        raise ConfigError("data.root=x: is not a folder")
    time.sleep(10_000)  # as a rank that waits for rank 0

if __name__ == "__main__":
    local.GRACE_S, local.REFUSED_S = 10_000.0, 0.1
    try:
        local.spawn(2, work)
    except ConfigError as error:
        print("refused:", error)
"""


def test_one_rank_refuses(tmp_path: Path) -> None:
    """What only rank 0 can check, such as a folder that it downloads into, is refused at once: the other ranks wait for
    it, and have nothing to save."""
    script = tmp_path / "refusing.py"
    script.write_text(REFUSING)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused: data.root=x: is not a folder\n", "")

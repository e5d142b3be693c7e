"""--local where no collective fails when a rank dies, as under NCCL; tests/slurm/test_silence.py has the same on Slurm.

The survivors wait in C, and no error reaches them. They used to be killed after 60 s, with every step since the last
save.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.ranks.group import MEETING_S
from laststep.records.metrics import read_lines
from tests.support.commands import SLOW_STEPS, Terminal, ranks_of
from tests.support.project import DEADLINE_S, SILENT_PATH, wait_until
from tests.support.ranks import fingerprint, pause, reasons
from tests.support.runs import undisturbed_run

WORDS = (*SLOW_STEPS, "train.max_steps=100", "checkpoint.every_epochs=null", "launch.tasks_per_node=2")
WITHIN_S = 25.0  # three seconds on an idle machine, see benchmarks/restart.py; a hang is noticed after a minute


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank(tmp_path: Path, rank: int) -> None:
    """No step is lost, and the ranks are back within seconds."""
    terminal = Terminal(tmp_path / "runs", PYTHONPATH=SILENT_PATH)
    launcher = terminal.starts("--local", "--name", "run", *WORDS)
    run = terminal.run("run")
    wait_until(lambda: len(read_lines(run.metrics)) > 30, "the run does not train")
    at = time.time()
    os.kill(ranks_of(launcher)[rank], signal.SIGKILL)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, said
    first, second = read_lines(run.attempts)
    assert reasons(run) == ["failed", "finished"] and first["lost_steps"] == 0
    assert second["start_step"] == first["end_step"] >= 30, "nothing was saved but the last step of the survivor"
    assert (took_s := pause(run, at)) < WITHIN_S, f"{took_s:.1f} s from SIGKILL to the first new step\n{said}"
    assert fingerprint(run) == undisturbed_run(Config.load("mnist", [*WORDS]))


def test_killed_before_the_ranks_have_met(tmp_path: Path) -> None:
    """Rank 0 has no connection to it yet, but its supervisor says so. Rank 0 used to wait for it for a minute."""
    terminal = Terminal(tmp_path / "runs", sys.executable, PYTHONPATH=SILENT_PATH)
    launcher = terminal.starts("--local", "--name", "early", *WORDS)
    wait_until(lambda: len(ranks_of(launcher)) == 2, "no ranks", poll_s=0.001)
    at = time.time()
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, said
    run = terminal.run("early")
    assert reasons(run) == ["failed", "finished"]
    assert "rank 1 on " in read_lines(run.attempts)[0]["error"]
    waited_s = read_lines(run.attempts)[0]["end"] - at
    assert waited_s < MEETING_S / 4, f"{waited_s:.1f} s from SIGKILL to the end of the attempt\n{said}"
    assert fingerprint(run) == undisturbed_run(Config.load("mnist", [*WORDS]))

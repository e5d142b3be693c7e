"""`python -m laststep hello` as a step of a real Slurm."""

from __future__ import annotations

import re
import subprocess

from tests.slurm.user import User
from tests.support.project import DEADLINE_S, PROJECT


def test_srun_over_two_nodes(user: User) -> None:
    """The first thing to try on a new cluster: all ranks answer, in rank order, and no file is left behind."""
    before = set(user.root.iterdir())
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1"]
    done = subprocess.run(
        [*srun, user.python, "-m", "laststep", "hello", f"launch.root={user.root}"],
        cwd=PROJECT,
        env=user.env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    greetings = re.findall(r"^\[n\d:\d+\] hello from \[(n\d):gloo\] rank (\d)/2$", done.stdout, re.MULTILINE)
    (first, *_), (second, *_) = greetings
    assert [rank for _, rank in greetings] == ["0", "1"] and first != second
    assert "sum of ones: 2 on every rank" in done.stdout
    assert set(user.root.iterdir()) == before

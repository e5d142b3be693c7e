"""A terminal in which tests type `python launch.py ...`, without Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.forked import forked_python
from tests.support.project import PROJECT
from tests.support.waiting import DEADLINE_S, wait_until
from trainer.records.metrics import read_lines
from trainer.rundir import RunDir

# Steps of 80 ms that take hardly any CPU time: each of their samples is read from a slow disk.
SLOW_STEPS = (
    "task=tests.support.tasks.Unhurried", "data.name=fake", "data.args.samples=400", "data.args.image_size=8",
    "train.batch_size=4",
)  # fmt: skip
LONG = (*SLOW_STEPS, "train.epochs=1000")


class Terminal:
    """A terminal in the project's folder, with a folder of its own for runs.

    `python` starts the command, which starts its ranks alike: by default forked processes, see tests/support/forked.
    """

    def __init__(self, root: Path, python: str | None = None, **env: str) -> None:
        self.root = root
        self.python = python or forked_python()
        self.env = {**os.environ, **env}

    def starts(self, *words: str) -> subprocess.Popen[str]:
        """Start `python launch.py WORDS`."""
        command = [self.python, "launch.py", *words, f"launch.root={self.root}"]
        return subprocess.Popen(
            command, cwd=PROJECT, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def types(self, *words: str, status: int = 0) -> str:
        """Run the same to its end; return what it printed. Any other exit status fails the test."""
        process = self.starts(*words)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == status, said
        return said

    def run(self, name: str) -> RunDir:
        """The folder of the run with this name."""
        return RunDir(self.root / name)

    def waits_for_step(self, name: str) -> None:
        """Wait until the run has finished its first steps."""
        wait_until(lambda: read_lines(self.run(name).metrics), f"{name} did not begin to train")


def ranks_of(launcher: subprocess.Popen[str] | subprocess.Popen[bytes]) -> list[int]:
    """Pids of the ranks that the launcher started, rank 0 first."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return sorted(map(int, children))

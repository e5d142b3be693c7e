"""A copy of this clone on a throwaway Slurm, where the commands of the pictures are typed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster
from tools.animation import Scene
from tools.terminal import Shot, photograph, watch

PROJECT = Path(__file__).resolve().parents[1]


def copy_clone(target: Path) -> Path:
    """Copy the files of this clone; returns the target."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, target / name, follow_symlinks=False)
    return target


class Desk:
    """The copy, in which the commands are typed, and its Slurm if there is one."""

    def __init__(self, folder: Path, slurm: bool) -> None:
        self.folder = copy_clone(folder / "laststep")
        self.cluster = Cluster.start(folder / "slurm") if slurm else None
        own = self.cluster.env if self.cluster else os.environ
        self.env = {**own, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.env |= {"OMP_NUM_THREADS": "1"}

    def types(self, command: str, columns: int, until: str | None = None) -> Scene:
        """Run a command in a terminal; Ctrl-C ends it after a line that matches `until`."""
        lines, took = watch(command, columns, self.folder, self.env, re.compile(until) if until else None)
        return Scene(command, lines, took)

    def photographs(self, command: str, columns: int, rows: int, when: str, end: str) -> Shot:
        """The screen of a command once it matches `when`; then the key `end` is pressed, and the command ends."""
        return photograph(command, (columns, rows), self.folder, self.env, re.compile(when), end)

    def state(self, run: str) -> dict[str, Any]:
        """What `status --json` says about a run."""
        done = subprocess.run(
            [sys.executable, "launch.py", "status", run, "--json"], cwd=self.folder, env=self.env, capture_output=True
        )
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def requeues(self, run: str) -> None:
        """Requeue the job of a run."""
        subprocess.run(["scontrol", "requeue", self.state(run)["job_id"]], env=self.env, check=True)

    def until(self, run: str, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait until the condition holds for a run. Raises TimeoutError."""
        deadline = time.monotonic() + 180
        while not condition(found := self.state(run)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{run}: not {what} within 180 s: {found}")
            time.sleep(0.5)

    def until_step(self, run: str, step: int) -> None:
        """Wait until a run has done this step."""
        self.until(run, lambda status: (status["step"] or 0) >= step, f"at step {step}")

    def until_state(self, run: str, state: str) -> None:
        """Wait until a run is in this state."""
        self.until(run, lambda status: bool(status["state"] == state), state)


@contextlib.contextmanager
def throwaway_desk(slurm: bool = True) -> Iterator[Desk]:
    """A desk that is cleared up at the end."""
    with tempfile.TemporaryDirectory(prefix="laststep-") as folder:
        here = Desk(Path(folder), slurm)
        try:
            yield here
        finally:
            if here.cluster:
                here.cluster.stop()

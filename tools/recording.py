"""Records docs/recording.svg, a run that is preempted and resumes, and draws docs/status.svg, a table of seven runs.

`python -m tools.recording`, as root, on Debian or Ubuntu, in about four minutes. Both show the real output of real
commands, typed in a copy of this clone on a throwaway Slurm.
"""

from __future__ import annotations

import argparse
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
from tools.animation import Scene, animate
from tools.picture import picture
from tools.terminal import watch

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
COLUMNS = 100  # a progress line of one rank among several fits
WIDE = 140  # no column of `status` is cut
# The commands of README's first run on Slurm, and the line after which Ctrl-C ends a command that follows a log.
JOURNEY: list[tuple[str, str | None]] = [
    ("python launch.py --nodes 2 --tasks-per-node 2 --name first", None),
    ("python launch.py logs first -f", r"step 1\d\d/"),
    ('sbatch -o /dev/null -p high -N4 --exclusive --wrap "sleep 5"', None),
    ("python launch.py logs first -f", r"step 2\d\d/"),
    ("python launch.py status first", None),
]


class Desk:
    """A copy of this clone on a throwaway Slurm, where commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "laststep"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, self.folder / name, follow_symlinks=False)
        self.cluster = Cluster.start(folder / "slurm")
        self.env = {**self.cluster.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.env |= {"OMP_NUM_THREADS": "1"}

    def types(self, command: str, until: str | None = None, columns: int = COLUMNS) -> Scene:
        """Run a command in a terminal; Ctrl-C ends it after a line that matches `until`."""
        lines, took = watch(command, columns, self.folder, self.env, re.compile(until) if until else None)
        return Scene(command, lines, took)

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

    def until(self, run: str, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait until the condition holds for a run. Raises TimeoutError."""
        deadline = time.monotonic() + 180
        while not condition(found := self.state(run)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{run}: not {what} within 180 s: {found}")
            time.sleep(0.5)
        return found


@contextlib.contextmanager
def throwaway_desk() -> Iterator[Desk]:
    """A desk that is cleared up at the end."""
    with tempfile.TemporaryDirectory(prefix="laststep-") as folder:
        here = Desk(Path(folder))
        try:
            yield here
        finally:
            here.cluster.stop()


def reached(step: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a run has done this step."""
    return lambda run: (run["step"] or 0) >= step


def is_(state: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a run is in this state."""
    return lambda run: run["state"] == state


def table_of_runs(desk: Desk) -> Scene:
    """`status` with a run in each state: more of them than four nodes can take, since each takes all their memory."""
    submit = "python launch.py launch.mem_gb=60"
    long = "--time 30 train.epochs=200 checkpoint.every_epochs=50"
    desk.types(f"{submit} --local --name digits train.epochs=4")
    desk.types(f"{submit} --name nan-lr train.epochs=2 optim.lr=1e30")
    desk.until("nan-lr", is_("failed"), "failed")
    desk.types(f"{submit} --name stopped-by-hand {long}")
    desk.until("stopped-by-hand", reached(50), "at step 50")
    desk.types("python launch.py cancel stopped-by-hand")
    desk.types(f"{submit} --nodes 2 --name baseline {long} train.batch_size=128")
    desk.types(f"{submit} --name wide {long}")
    desk.until("wide", reached(50), "at step 50")
    desk.requeues("wide")
    desk.until("wide", lambda run: run["state"] == "running" and run["attempts"] == 2, "running again")
    desk.types(f"{submit} --name augment {long} data.args.augment=true")
    desk.until("augment", reached(200), "at step 200")
    desk.types(f"{submit} --nodes 2 --name ema {long} train.ema_decay=0.999")
    desk.requeues("augment")
    desk.until("augment", is_("requeued"), "requeued")
    return desk.types("python launch.py status", columns=WIDE)


def main() -> None:
    """Record, and write the two pictures."""
    parser = argparse.ArgumentParser(prog="python -m tools.recording", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("recording", "status"), help="make only this picture")
    words = parser.parse_args()
    if words.only != "status":
        with throwaway_desk() as here:
            scenes = [here.types(command, until) for command, until in JOURNEY]
        (DOCS / "recording.svg").write_text(animate(scenes, COLUMNS))
    if words.only != "recording":
        with throwaway_desk() as here:
            table = table_of_runs(here)
        (DOCS / "status.svg").write_text(picture(table.command, table.lines, WIDE))


if __name__ == "__main__":
    main()

"""--follow: stream rank 0's log until the run ends, through every requeue."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from submitit import SlurmJob

from trainer.cluster.standing import Lookout, Standing
from trainer.rundir import RunDir

POLL_S = 0.5


def follow(run: RunDir, job: SlurmJob[dict[str, float]]) -> int:
    """Stay until the run ends; returns the exit status. Ctrl-C leaves the job alone."""
    lookout, offset = Lookout(), 0
    try:
        while True:
            # First look for the end, then read: so the last lines are in what is read.
            (now,) = lookout.look([run])
            offset = print_new(job.paths.stdout, offset)
            if now.state == "finished":
                return 0
            if not now.alive:
                print(f"[laststep] {_ended(run, now)}", file=sys.stderr)
                return 1
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(f"\n[laststep] {run.name} goes on; `python launch.py cancel {run.path}` ends it", file=sys.stderr)
        return 130


def _ended(run: RunDir, now: Standing) -> str:
    why = f" ({now.why})" if now.why else ""
    if now.state in ("failed", "lost"):
        return f"the run ended: {now.state}{why}; each rank's log is in {run.logs}"
    return f"job {now.job_id} left the queue unfinished{why}; go on: python launch.py resume {run.path}"


def print_new(log: Path, offset: int) -> int:
    """Print what a log has after `offset` bytes; returns the new offset. Its `error: ...` lines go to stderr."""
    if not log.exists():
        return offset
    with log.open("rb") as file:
        file.seek(offset)
        data = file.read()
    with contextlib.suppress(OSError):  # the terminal may be gone; the log is not
        for line in data.splitlines(keepends=True):
            terminal = sys.stderr if line.startswith(b"error: ") else sys.stdout
            terminal.buffer.write(line)
            terminal.flush()
    return offset + len(data)

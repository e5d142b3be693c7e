"""--follow: stream rank 0's log until the run ends, through every requeue."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from submitit import SlurmJob

from trainer.observe.attempts import FAILURES
from trainer.observe.metrics import read_lines
from trainer.rundir import RunDir

POLL_S = 0.5
# squeue asks the controller that all users share, so seldom.
QUEUE_POLL_S = 10.0


def follow(run: RunDir, job: SlurmJob[dict[str, float]]) -> int:
    """Stay until the run ends; returns the exit status. Ctrl-C leaves the job alone."""
    seen = len(read_lines(run.attempts))
    offset, next_look = 0, time.monotonic() + QUEUE_POLL_S
    try:
        while True:
            # First look for the end, then read: so the last lines are in what is read.
            ends = read_lines(run.attempts)[seen:]
            gone = False
            if time.monotonic() > next_look:
                gone, next_look = not in_queue(job.job_id), time.monotonic() + QUEUE_POLL_S
            offset = print_new(job.paths.stdout, offset)
            if any(end["reason"] == "finished" for end in ends):
                return 0
            if any(end["reason"] in FAILURES and not end["requeue"] for end in ends):
                print(f"[laststep] the run failed; each rank's log is in {run.logs}", file=sys.stderr)
                return 1
            if gone:
                print(
                    f"[laststep] job {job.job_id} left the queue unfinished; go on: python launch.py resume {run.path}",
                    file=sys.stderr,
                )
                return 1
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(f"\n[laststep] {run.name} goes on; `python launch.py cancel {run.path}` ends it", file=sys.stderr)
        return 130


def in_queue(job_id: str) -> bool:
    """Whether the job waits or runs. True when squeue does not answer: unknown is not gone."""
    asked = subprocess.run(["squeue", "--noheader", "--job", job_id, "--format=%T"], capture_output=True, text=True)
    if asked.returncode:
        return "Invalid job id" not in asked.stderr
    return bool(asked.stdout.strip())


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

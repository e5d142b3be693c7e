"""--follow: stream rank 0's log until the run ends, through every requeue."""

from __future__ import annotations

import sys
import time

from submitit import SlurmJob

from trainer.cluster.live_log import Screen
from trainer.cluster.run_status import RunStatus, StatusReader
from trainer.rundir import RunDir

POLL_S = 0.5


def follow(run: RunDir, job: SlurmJob[dict[str, float]]) -> int:
    """Stay until the run ends; returns the exit status. Ctrl-C leaves the job alone."""
    lookout = StatusReader()
    try:
        with Screen(run, job.paths.stdout) as screen:
            while True:
                # First look for the end, then read: so the last lines are in what is read.
                (now,) = lookout.look([run])
                screen.update()
                if not now.alive:
                    break
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(f"\n[laststep] {run.name} goes on; `python launch.py cancel {run.path}` ends it", file=sys.stderr)
        return 130
    if now.state == "finished":
        return 0
    print(f"[laststep] {_ended(run, now)}", file=sys.stderr)
    return 1


def _ended(run: RunDir, now: RunStatus) -> str:
    why = f" ({now.why})" if now.why else ""
    if now.state in ("failed", "lost"):
        return f"the run ended: {now.state}{why}; each rank's log is in {run.logs}"
    return f"job {now.job_id} left the queue unfinished{why}; go on: python launch.py resume {run.path}"

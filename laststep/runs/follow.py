"""--follow: print rank 0's log until the run ends, through every requeue."""

from __future__ import annotations

import sys
import time

from submitit import SlurmJob

from laststep.rundir import RunDir
from laststep.runs.live_log import LiveLog
from laststep.runs.run_folders import typed
from laststep.runs.run_status import RunStatus, StatusReader, still_prints
from laststep.runs.waiting import Waiting
from laststep.say import command

POLL_S = 0.5


def follow(run: RunDir, job: SlurmJob[dict[str, float]]) -> int:
    """Stay until the run ends; returns the exit status. Ctrl-C leaves the job alone."""
    reader = StatusReader()
    waiting = Waiting(lambda text: print(f"[laststep] {text}", file=sys.stderr, flush=True))
    try:
        with LiveLog(run, job.paths.stdout) as log:
            while True:
                # Status before log: once the run has ended, this update prints its last lines.
                (status,) = reader.read([run])
                ended = not status.alive and not still_prints(run)
                log.update()
                if ended:
                    break
                waiting.update(status)
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        to_end = command(f"cancel {typed(run)}")
        print(f"\n[laststep] {run.name} is still running; to end it: {to_end}", file=sys.stderr)
        return 130
    if status.state == "finished":
        return 0
    print(f"[laststep] {_how_it_ended(run, status)}", file=sys.stderr)
    return 1


def _how_it_ended(run: RunDir, status: RunStatus) -> str:
    why = f" ({status.why})" if status.why else ""
    if status.state in ("failed", "lost"):
        return f"the run ended: {status.state}{why}; the ranks' logs are in {run.logs}"
    resume = command(f"resume {typed(run)}")
    return f"job {status.job_id} left the queue before the run finished{why}; to continue: {resume}"

"""`resume --watch`: resume a run each time that its job has ended before it, from a machine that can submit jobs.

For clusters whose compute nodes cannot call scontrol: there neither a rank nor the batch shell can requeue the job. The
watcher may be ended and started again at any time: all that it forgets is how many jobs in a row have failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from laststep import rooms
from laststep.config.errors import ConfigError
from laststep.ranks.slurm import is_job_id, show_job
from laststep.records.attempt_record import AttemptRecord
from laststep.rundir import RunDir
from laststep.runs.run_status import RunStatus, StatusReader, records_of

POLL_S = 10.0


def watch(run: RunDir, max_failures: int, resume: Callable[[], object], say: Callable[[str], None]) -> int:
    """Stay until the run has ended for good; returns 0 if it has finished, else 1.

    `resume` submits a job that continues the run. If it raises ConfigError, for example because Slurm refuses the job,
    it is called again later. After more than `max_failures` jobs in a row that kept no step, the run is left alone.
    """
    reader, idle, ended, refusal = StatusReader(), 0, None, ""
    while True:
        (status,) = reader.read([run])
        if status.state == "finished":
            rooms.look_on(run)
            return 0
        if not status.alive:
            records = records_of(run)
            rooms.look_on(run)
            if ended != status.job_id:
                ended = status.job_id
                idle = 0 if kept_step(records) > kept_step(r for r in records if r["job_id"] != ended) else idle + 1
            why_not = why_ended(status, records)
            if not why_not and idle > max_failures:
                why_not = f"retry budget used up (launch.max_failures={max_failures})"
            if why_not:
                say(f"{run.name}: not resumed: {why_not}")
                return 1
            try:
                resume()
            except ConfigError as error:
                if refusal != str(error):
                    refusal = str(error)
                    say(f"{refusal}; trying again every {POLL_S:.0f} s")
        time.sleep(POLL_S)


def why_ended(status: RunStatus, records: Sequence[AttemptRecord]) -> str:
    """Why the run is not to be continued, now that its job has left the queue; empty if it is."""
    if status.job_id is None or not is_job_id(status.job_id):
        return "it was not submitted to Slurm"
    # Slurm knows for some minutes how a job ended. The ranks on such a cluster cannot ask why they were signalled.
    state = (show_job(status.job_id) or {}).get("JobState", "")
    last = next((record for record in reversed(records) if record["job_id"] == status.job_id), None)
    if state == "CANCELLED" or (last is not None and last["reason"] == "cancelled"):
        return f"job {status.job_id} was cancelled"
    if last is not None and last["reason"] in ("failed", "hung", "timeout") and not last["requeue"]:
        return status.why or last["reason"]
    return ""


def kept_step(records: Iterable[AttemptRecord]) -> int:
    """The last step that any attempt has kept."""
    return max((record["end_step"] - record["lost_steps"] for record in records), default=0)

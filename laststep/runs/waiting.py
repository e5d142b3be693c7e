"""Why a job waits in the queue, in the words of Slurm and, for a limit of its partition, with that limit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from laststep.ranks.slurm import Partition, show_job, show_partitions
from laststep.runs.run_status import RunStatus
from laststep.say import counted

UNLIMITED = "UNLIMITED"
# Reasons of squeue that waiting alone does not end (man squeue, "job reason codes").
MAY_NEVER_START = re.compile(
    r"Partition(Node|Time)Limit|Partition(Down|Inactive)|BadConstraints|Invalid(Account|QOS)|JobHeldAdmin"
    r"|(Account|QOS)NotAllowed|.*(PerJob|WallDuration).*"
)


class Waiting:
    """Says why a run waits, once for each reason."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, ("", "")

    def update(self, status: RunStatus) -> None:
        """Say it unless it was said before; `status` is the run's present one."""
        now = (status.state, status.why)
        if now != self._said and (text := waiting_for(status)):
            self._say(f"{status.run}: {text}")
        self._said = now


def may_never_start(status: RunStatus) -> str:
    """A warning about a job that has just been submitted; empty if it only waits for its turn."""
    if not MAY_NEVER_START.match(status.why):
        return ""
    return f"job {status.job_id} may never start; {waiting_for(status)}"


def waiting_for(status: RunStatus) -> str:
    """For example `queued: PartitionNodeLimit, main has 4 nodes`; empty if the run does not wait in the queue."""
    if status.state not in ("queued", "requeued"):
        return ""
    parts = [status.why] if status.why else []
    if status.job_id is not None and status.why.startswith("Partition"):
        job = show_job(status.job_id) or {}
        parts += [limit_of(partition, status.why) for partition in show_partitions(job.get("Partition"))]
    if status.starts_at is not None and status.starts_at > time.time():
        parts.append(f"expected to start at {time.strftime('%F %H:%M', time.localtime(status.starts_at))}")
    text = ", ".join(filter(None, parts))
    return f"{status.state}: {text}" if text else status.state


def limit_of(partition: Partition, reason: str) -> str:
    """The partition's limit that a reason of squeue is about; empty for a reason that is not about one."""
    name = partition.get("PartitionName", "")
    if reason == "PartitionNodeLimit":
        nodes = counted(partition.get("TotalNodes", "?"), "node")
        most = partition.get("MaxNodes", UNLIMITED)
        return f"{name} has {nodes}" + ("" if most == UNLIMITED else f" and gives a job at most {most}")
    if reason == "PartitionTimeLimit":
        return f"{name} allows at most {partition.get('MaxTime', UNLIMITED)}"
    return f"{name} is {partition['State']}" if "State" in partition else ""

"""World: this process's place among the ranks of one attempt."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """This process's place among the processes of one attempt.

    `rank` counts over all nodes, `local_rank` on this node. `hosts` has the node of each rank, "" where the launcher
    does not tell and the ranks have not met yet. `job_id` is Slurm's where there is one. `attempt` names the attempt in
    files: it differs between two jobs, two starts of a requeued one, and two steps of the same.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    hosts: tuple[str, ...]
    job_id: str
    restart: int
    attempt: str
    launcher: str
    on_slurm: bool  # a requeue can be asked for, and Slurm answers for the end of the job
    starts_again: bool = False  # the launcher does, by itself, all ranks when one has failed
    variables: tuple[str, ...] = ()  # of the environment, that said so
    number: int | None = None  # of the attempt among those of its run, once rank 0 has told it

    def host_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.hosts[rank] or "an unknown host"

    @property
    def by_submitit(self) -> bool:
        """Whether submitit started it, so that its files are there, and in a job of Slurm's its way to requeue."""
        return self.launcher.startswith("submitit")

    def __str__(self) -> str:
        job = f"slurm job {self.job_id}, restart {self.restart}" if self.on_slurm else self.job_id
        said = f"{self.launcher}, by {' and '.join(self.variables)}" if self.variables else self.launcher
        return f"rank {self.rank} of {self.size} on {self.host_of(self.rank)} ({job}; {said})"


class MeetingError(RuntimeError):
    """The ranks of an attempt did not find each other."""


def hostname() -> str:
    """This node, as Slurm calls it where Slurm has started this process."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()

"""World: which process of an attempt this is, and who said so."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from submitit import JobEnvironment


@dataclass(frozen=True)
class World:
    """This process's place among the processes of one attempt.

    `rank` counts over all nodes, `local_rank` on this node; `hosts` are the nodes' names, that of rank 0 first.
    `attempt` names the attempt: it differs between two jobs and between two starts of a requeued one.
    """

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: int
    hosts: tuple[str, ...]
    job_id: str
    restart: int
    launcher: str

    @property
    def attempt(self) -> str:
        """Job id and restart count, a name for files of this attempt alone."""
        return f"{self.job_id}-{self.restart}"

    @property
    def local_size(self) -> int:
        """Ranks on this node."""
        return self.size // self.nodes

    def host_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.hosts[min(rank // self.local_size, len(self.hosts) - 1)]

    @property
    def on_slurm(self) -> bool:
        """Whether a requeue can be asked for and Slurm answers for the end of the job."""
        return self.launcher == "slurm"

    @classmethod
    def detect(cls) -> World:
        """Read submitit's JobEnvironment (Slurm, local or debug); without one, a world of this process alone."""
        try:
            env = JobEnvironment()
        except RuntimeError:  # submitit's word for "not inside a job of mine"
            host = socket.gethostname()
            return cls(0, 1, 0, 0, 1, (host,), f"pid{os.getpid()}", 0, "python")
        return cls(
            rank=env.global_rank,
            size=env.num_tasks,
            local_rank=env.local_rank,
            node=env.node,
            nodes=env.num_nodes,
            hosts=tuple(env.hostnames),
            job_id=env.job_id,
            restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)) if env.name() == "slurm" else 0,
            launcher=env.name(),
        )

    def __str__(self) -> str:
        job = f"{self.launcher}, job {self.job_id}, restart {self.restart}"
        return f"rank {self.rank} of {self.size} on {self.host_of(self.rank)} ({job})"

"""The schema of the section launch: how a run gets its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laststep.config.gpus import gpus_in
from laststep.config.setting import setting

# sbatch options that Laststep sets itself, and the key to use instead of launch.slurm.OPTION.
RESERVED_SBATCH_OPTIONS = {
    "nodes": "launch.nodes",
    "ntasks": "launch.tasks_per_node",
    "ntasks-per-node": "launch.tasks_per_node",
    "cpus-per-task": "launch.cpus_per_task",
    "mem": "launch.mem_gb",
    "time": "launch.time_min",
    "partition": "launch.partition",
    "account": "launch.account",
    "qos": "launch.qos",
    "constraint": "launch.constraint",
    "exclude": "launch.exclude",
    "job-name": "launch.name",
    "signal": "launch.signal_delay_s",
    "output": "launch.root: the output goes to RUN/logs/ there",
    "error": "launch.root: the output goes to RUN/logs/ there",
    "open-mode": "launch.root: the output goes to RUN/logs/ there",
}


@dataclass
class Launch:
    """The size of the job, where it runs, when it ends, and when it is requeued."""

    name: str | None = setting(
        None, "name of the run and of its folder; null: made from the configuration's name and the time"
    )
    root: str = setting("runs", "folder of all runs; on a cluster it must be on a file system that all nodes share")
    nodes: int | str = setting(
        1,
        "number of nodes, or a range such as 1-4: each start takes as many as are free (--local: the smallest number)",
        least=1,
    )
    spare_nodes: int = setting(
        0,
        "nodes that the job allocates beyond launch.nodes: after a fault one replaces a node that is dead or blamed, "
        "without a requeue. launch.setup runs there too",
        least=0,
    )
    gpus_per_node: int = setting(
        0, "GPUs per node, one rank for each; 0: as many as launch.slurm asks for, else train on CPUs", least=0
    )
    tasks_per_node: int | None = setting(None, "ranks per node when training on CPUs; null: 1", least=1)
    cpus_per_task: int = setting(1, "CPU cores per rank, including those for its loader processes", least=1)
    mem_gb: float | None = setting(None, "memory per node, in GB; null: the cluster's default", least=0)
    time_min: int = setting(
        60,
        "time limit of one attempt: minutes, or H:M:S, D-H or D-H:M:S as for sbatch; a run may take many attempts",
        least=1,
    )
    partition: str | None = setting(None, "Slurm partition; null: the cluster's default")
    account: str | None = setting(None, "Slurm account to charge")
    qos: str | None = setting(None, "Slurm quality of service")
    constraint: str | None = setting(None, "node features that Slurm must provide, e.g. a100")
    exclude: str | None = setting(None, "nodes that Slurm must not use, e.g. node[7,9]")
    signal_delay_s: int = setting(90, "seconds before the time limit at which the run saves and is requeued", least=1)
    grace_s: int | None = setting(
        None,
        "seconds that the cluster leaves between SIGTERM and SIGKILL; null: ask Slurm for its KillWait, or 30 without "
        "an answer. Not used under --local, where nothing sends SIGKILL",
        least=1,
    )
    max_timeouts: int = setting(
        100, "attempts of a job that may end at the time limit before it is no longer requeued", least=0
    )
    max_restarts: int = setting(
        3,
        "times that the ranks are started again in the same allocation after a crash, a hang or a loss, before the job "
        "is requeued; counted anew once a new step is kept",
        least=0,
    )
    max_failures: int = setting(
        3,
        "allocations of a job in which attempts may crash, hang, be lost, or do steps until the time limit, without "
        "keeping a new step before it is no longer requeued",
        least=0,
    )
    exclude_after: int | None = setting(
        2,
        "faults of a run that one node may be blamed for within a day (its rank was killed or stuck, its GPU failed) "
        "before the run leaves it: at the next start of the ranks if enough nodes are left, and in any requeue and "
        "resume; null: never",
        least=1,
    )
    hang_timeout_s: int = setting(600, "seconds that a rank waits for its peers before it ends the attempt", least=1)
    init_method: str | None = setting(
        None,
        "where the ranks meet: tcp://HOST:PORT, env:// (MASTER_ADDR and MASTER_PORT), or file://PATH on a shared disk; "
        "null: env:// where those variables are set, else a file in the run's folder",
    )
    backend: str = setting(
        "auto",
        "backend of the ranks' collectives; auto: nccl on GPUs, gloo on CPUs. gloo runs on both, slowly on GPUs: use "
        "it to find out whether NCCL is the problem",
        choices=("auto", "nccl", "gloo"),
    )
    preflight: bool = setting(
        True,
        "check each node while its ranks start: GPUs (their errors with nvidia-ml-py installed, and a product of "
        "matrices), memory, disks, clock. A node that fails is named and blamed, and the attempt is retried",
    )
    setup: list[str] = setting(
        [], "shell lines that run once on every node before the ranks start, e.g. 'module load cuda'"
    )
    python: str | None = setting(
        None,
        "command that starts Python in each rank, e.g. 'apptainer exec --nv /images/torch.sif python'; null: the "
        "Python that submits",
    )
    srun: list[str] = setting(
        [], "extra arguments for the srun that starts the ranks, e.g. --container-image=... for Pyxis"
    )
    env: dict[str, str] = setting({}, "environment variables of the job, e.g. launch.env.NCCL_DEBUG=INFO")
    slurm: dict[str, Any] = setting(
        {},
        "any other sbatch option, by its long name, e.g. launch.slurm.reservation=lab or launch.slurm.gres=gpu:a100:4; "
        "null: not this option",
    )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: one per GPU, or `tasks_per_node` on CPUs."""
        return self.gpus or self.tasks_per_node or 1

    @property
    def gpus_in_slurm(self) -> dict[str, int]:
        """The GPUs per node that `slurm` asks for, by the option; see laststep.config.gpus."""
        return gpus_in(self.slurm, self.job_nodes, self.tasks_per_node or 1)

    @property
    def gpus(self) -> int:
        """GPUs per node, however the job asks for them."""
        return self.gpus_per_node or max(self.gpus_in_slurm.values(), default=0)

    @property
    def gpus_key(self) -> str:
        """What asks for the GPUs, as it is written in a configuration."""
        return (
            f"launch.gpus_per_node={self.gpus_per_node}" if self.gpus_per_node else next(iter(self.gpus_in_slurm), "")
        )

    @property
    def node_counts(self) -> range:
        """The numbers of nodes that the job may get."""
        least, _, most = str(self.nodes).partition("-")
        return range(int(least), int(most or least) + 1)

    @property
    def job_nodes(self) -> str:
        """The nodes that the job asks for, as sbatch has it: a number or a range, with the spare ones."""
        counts, most = self.node_counts, self.node_counts[-1] + self.spare_nodes
        return str(most) if len(counts) == 1 else f"{counts[0]}-{most}"

    @property
    def chooses_nodes(self) -> bool:
        """Whether the ranks need not run on all nodes of the job: after a fault they may start on others of them."""
        return self.spare_nodes > 0 or len(self.node_counts) > 1

    @property
    def world_sizes(self) -> range:
        """The numbers of ranks that the job may have."""
        counts, each = self.node_counts, self.ranks_per_node
        return range(counts.start * each, counts.stop * each, each)

    @property
    def world_size(self) -> int:
        """The number of ranks of the whole job; of a range, the smallest."""
        return self.world_sizes[0]

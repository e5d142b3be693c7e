"""The cluster's settings: what Slurm reports, and which of them could break a run.

Read from `scontrol show config`, `show partition` and `show node`, as Slurm 22.05 prints them. The rules follow
man slurm.conf, or were observed on the throwaway cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from laststep import say
from laststep.attempt.grace import LAST_MOMENT_S
from laststep.config.errors import ConfigError, nearest
from laststep.config.schema import Launch
from laststep.ranks.slurm import (
    DEFAULT_KILL_WAIT_S,
    SlurmError,
    can_expedite,
    command,
    parse_config,
    parse_records,
    scontrol,
)

CRED_EXPIRE_S = 120  # Slurm's default
Fields = Mapping[str, str]


@dataclass(frozen=True)
class SlurmSettings:
    """A cluster's settings, and the fields of each partition and node."""

    config: Fields
    partitions: Sequence[Fields]
    nodes: Sequence[Fields]
    sacct_error: str | None  # why sacct does not answer; None when it does

    @classmethod
    def read(cls) -> SlurmSettings:
        """Ask Slurm. Raises SlurmError when it is not installed here, or does not answer."""
        config = parse_config(scontrol("show", "config"))
        partitions = parse_records(scontrol("show", "partition", "--oneliner"))
        nodes = parse_records(scontrol("show", "node", "--oneliner"))
        try:
            command("sacct", "--noheader", "--allocations", "--starttime=now", "--format=JobID")
        except SlurmError as error:
            return cls(config, partitions, nodes, str(error))
        return cls(config, partitions, nodes, None)

    @property
    def kill_wait_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        return int(self.config.get("KillWait", str(DEFAULT_KILL_WAIT_S)).split()[0])

    @property
    def cred_expire_s(self) -> int:
        """Seconds that a requeued job waits before it may start again."""
        found = re.search(r"cred_expire=(\d+)", self.config.get("AuthInfo", ""))
        return int(found[1]) if found else CRED_EXPIRE_S

    @property
    def requeue_delay(self) -> str:
        """When a requeued job may start again."""
        if "enable_expedited_requeue" in self.config.get("SlurmctldParameters", "") and can_expedite(
            self.config.get("SLURM_VERSION", "")
        ):
            return "starts again as soon as it finds nodes (--requeue=expedite)"
        return f"waits {self.cred_expire_s} s before it starts again (AuthInfo's cred_expire)"

    @property
    def sends_user_signal(self) -> bool:
        """Whether a preemption sends the signal that sbatch's --signal names. The option moved after 22.05."""
        return "send_user_signal" in self.config.get("SlurmctldParameters", "") + self.config.get(
            "PreemptParameters", ""
        )

    def of_partition(self, name: str | None) -> SlurmSettings:
        """The same, with one partition, or those in `a100,h100`, and their nodes only; None: all. Raises ConfigError
        for an unknown partition."""
        if name is None:
            return self
        names, wanted = [partition["PartitionName"] for partition in self.partitions], name.split(",")
        if unknown := [one for one in wanted if one not in names]:
            raise ConfigError(f"launch.partition={name}: no such partition; {nearest(unknown[0], names)}")
        partitions = [partition for partition in self.partitions if partition["PartitionName"] in wanted]
        nodes = [node for node in self.nodes if set(wanted) & set(node.get("Partitions", "").split(","))]
        return SlurmSettings(self.config, partitions, nodes, self.sacct_error)


def check_slurm(slurm: SlurmSettings, launch: Launch) -> Iterator[Problem]:
    """Anything about the cluster that could break a run with these launch settings."""
    yield from _check_grace(slurm, launch)
    yield from _check_requeue(slurm, launch)
    if slurm.sacct_error is not None:
        yield Problem(
            f"no accounting ({slurm.sacct_error}): submitit's job.result() never returns for a job that ends without a "
            "result",
            f"use `{say.command('status')}`, which needs no accounting",
        )
    most = max((int(node["CPUTot"]) for node in slurm.nodes if "CPUTot" in node), default=None)
    if most is not None and launch.ranks_per_node * launch.cpus_per_task > most:
        each = most // launch.ranks_per_node
        yield Problem(
            f"launch.cpus_per_task={launch.cpus_per_task} x {say.counted(launch.ranks_per_node, 'rank')} per node: "
            f"no node has more than {say.counted(most, 'CPU')}, so the job would never start",
            f"set launch.cpus_per_task={each}" if each else f"use at most {say.counted(most, 'rank')} per node",
        )


def check_gpu_binding(slurm: SlurmSettings, launch: Launch) -> Iterator[Problem]:
    """Whether Slurm hides from each rank the GPUs of the node's other ranks: NCCL opens those to reach them directly.

    An option per task implies --gpu-bind=per_task (man srun), and ConstrainDevices (man cgroup.conf) turns that choice,
    otherwise a mere CUDA_VISIBLE_DEVICES, into a limit.
    """
    bound = [key for key in launch.gpus_in_slurm if key.partition("=")[0].replace("_", "-").endswith("-per-task")]
    chosen = {"gpu-bind", "gpu_bind"} & set(launch.slurm) or any("--gpu-bind" in word for word in launch.srun)
    if bound and not chosen and launch.ranks_per_node > 1 and slurm.config.get("ConstrainDevices", "no") == "yes":
        yield Problem(
            f"{bound[0]}: with ConstrainDevices=yes Slurm hides the other GPUs of its node from a rank, so that NCCL "
            "cannot use NVLink or P2P between them and copies through host memory",
            f"use launch.gpus_per_node={launch.ranks_per_node} instead, with launch.slurm.gpu-bind=none",
        )


def _check_grace(slurm: SlurmSettings, launch: Launch) -> Iterator[Problem]:
    """The seconds between SIGTERM and SIGKILL."""
    grace = slurm.kill_wait_s
    if launch.grace_s is not None and launch.grace_s > grace:
        yield Problem(
            f"launch.grace_s={launch.grace_s}: Slurm sends SIGKILL after KillWait={grace} s, perhaps in the middle of "
            "a save",
            "remove it: the value is read from the cluster",
        )
    if grace < DEFAULT_KILL_WAIT_S:
        yield Problem(
            f"KillWait={grace} s (Slurm's default is {DEFAULT_KILL_WAIT_S}): after SIGTERM, a step that takes more "
            f"than {grace / 2:g} s is abandoned, and a save that is not finished within "
            f"{max(0, grace - LAST_MOMENT_S):g} s is lost",
            "ask for a longer KillWait, or use short steps (train.batch_size) and a lower checkpoint.every_minutes",
        )


def _check_requeue(slurm: SlurmSettings, launch: Launch) -> Iterator[Problem]:
    """Anything that could prevent a requeue, or requeue a job that should end."""
    if {"no-requeue", "no_requeue"} & set(launch.slurm):
        yield Problem(
            "launch.slurm.no-requeue: Slurm refuses to requeue the job, so a preemption or a time limit ends it",
            f"remove it, or continue by hand with `{say.command('resume')}`",
        )
    if cancelling := ", ".join(_cancels_on_preemption(slurm)):
        yield Problem(
            f"PreemptMode=CANCEL ({cancelling}): a preempted job returns only if it requeues itself within "
            f"KillWait={slurm.kill_wait_s} s, as a run does",
            f"choose another partition or QOS, or check with `{say.command('status')}` and continue with "
            f"`{say.command('resume')}`",
        )
    if statuses := slurm.config.get("RequeueExit"):
        yield Problem(
            f"RequeueExit={statuses}: Slurm requeues a job that exits with such a status, even when "
            "launch.max_failures is used up",
            f"end such a run with `{say.command('cancel')}`",
        )
    if statuses := slurm.config.get("RequeueExitHold"):
        yield Problem(
            f"RequeueExitHold={statuses}: Slurm requeues a job that exits with such a status, and holds it",
            f"release it with `scontrol release`, or end it with `{say.command('cancel')}`",
        )


def _cancels_on_preemption(slurm: SlurmSettings) -> Iterator[str]:
    """The partitions or QOS in which a preempted job is cancelled."""
    kind = slurm.config.get("PreemptType")
    if kind == "preempt/partition_prio":
        for partition in slurm.partitions:
            if "CANCEL" in partition["PreemptMode"]:
                yield f"partition {partition['PartitionName']}"
    elif kind == "preempt/qos" and "CANCEL" in slurm.config.get("PreemptMode", ""):
        yield "every QOS that sets no other mode"


@dataclass(frozen=True)
class Problem:
    """Something that could break a run, and how to fix it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"

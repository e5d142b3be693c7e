"""What of a cluster, and of the place where runs are kept, endangers a run, and what to set against it.

Read from `scontrol show config`, `show partition` and `show node`, as Slurm 22.05 prints them; what is said of their
words is man slurm.conf's, or was seen on the throwaway cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.attempt.grace import LAST_MOMENT_S
from trainer.config.errors import ConfigError, nearest
from trainer.config.schema import Launch
from trainer.doctor.file_system import Place
from trainer.world.slurm import DEFAULT_KILL_WAIT_S as KILL_WAIT_S
from trainer.world.slurm import SlurmError, command, scontrol

CRED_EXPIRE_S = 120  # Slurm's default
FREE_GB = 10
Words = Mapping[str, str]


@dataclass(frozen=True)
class Danger:
    """What may cost a run, and the way out."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


@dataclass(frozen=True)
class Slurm:
    """What a cluster says of itself: settings, and a record for each partition and node."""

    config: Words
    partitions: Sequence[Words]
    nodes: Sequence[Words]
    no_sacct: str | None  # why sacct does not answer

    @classmethod
    def ask(cls) -> Slurm:
        """Raises SlurmError when Slurm is not here, or does not answer."""
        config = settings(scontrol("show", "config"))
        partitions = records(scontrol("show", "partition", "--oneliner"))
        nodes = records(scontrol("show", "node", "--oneliner"))
        try:
            command("sacct", "--noheader", "--allocations", "--starttime=now", "--format=JobID")
        except SlurmError as error:
            return cls(config, partitions, nodes, str(error))
        return cls(config, partitions, nodes, None)

    @property
    def kill_wait_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        return int(self.config.get("KillWait", str(KILL_WAIT_S)).split()[0])

    @property
    def cred_expire_s(self) -> int:
        """Seconds that a requeued job waits before it may start again."""
        found = re.search(r"cred_expire=(\d+)", self.config.get("AuthInfo", ""))
        return int(found[1]) if found else CRED_EXPIRE_S

    @property
    def sends_user_signal(self) -> bool:
        """Whether a preemption comes with the signal that sbatch's --signal names. The option moved after 22.05."""
        return "send_user_signal" in self.config.get("SlurmctldParameters", "") + self.config.get(
            "PreemptParameters", ""
        )

    def chosen(self, name: str | None) -> Slurm:
        """The same, as seen from one partition alone. Raises ConfigError when there is none of that name."""
        if name is None:
            return self
        names = [one["PartitionName"] for one in self.partitions]
        if name not in names:
            raise ConfigError(f"launch.partition={name}: no such partition; {nearest(name, names)}")
        partitions = [one for one in self.partitions if one["PartitionName"] == name]
        nodes = [one for one in self.nodes if name in one.get("Partitions", "").split(",")]
        return Slurm(self.config, partitions, nodes, self.no_sacct)


def settings(text: str) -> Words:
    """`scontrol show config`: name -> value; what is not set is left out."""
    pairs = (line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, value in pairs if not value.strip().startswith("(null")}


def records(text: str) -> list[Words]:
    """What `scontrol show ... --oneliner` prints: a record a line."""
    lines = ([word.split("=", 1) for word in line.split() if "=" in word] for line in text.splitlines())
    return [dict(words) for words in lines if words]


def of_slurm(slurm: Slurm, launch: Launch) -> Iterator[Danger]:
    """What of the cluster endangers such a run."""
    yield from _of_time(slurm, launch)
    yield from _of_requeues(slurm, launch)
    if slurm.no_sacct is not None:
        yield Danger(
            f"no accounting ({slurm.no_sacct}): submitit's job.result() waits for ever for a job that ends without one",
            "ask `launch.py status`, which needs none",
        )
    most = max((int(node["CPUTot"]) for node in slurm.nodes if "CPUTot" in node), default=None)
    if most is not None and launch.ranks_per_node * launch.cpus_per_task > most:
        each = most // launch.ranks_per_node
        yield Danger(
            f"launch.cpus_per_task={launch.cpus_per_task} x {launch.ranks_per_node} ranks a node: no node has more "
            f"than {most} CPUs, so such a job never starts",
            f"set launch.cpus_per_task={each}" if each else f"use at most {most} ranks a node",
        )


def _of_time(slurm: Slurm, launch: Launch) -> Iterator[Danger]:
    """The seconds between SIGTERM and SIGKILL."""
    grace = slurm.kill_wait_s
    if launch.grace_s is not None and launch.grace_s > grace:
        yield Danger(
            f"launch.grace_s={launch.grace_s}: SIGKILL comes after KillWait={grace} s, perhaps in the middle of a save",
            "leave it out: it is read from the cluster",
        )
    if grace < KILL_WAIT_S:
        yield Danger(
            f"KillWait={grace} s (Slurm's default is {KILL_WAIT_S}): at a SIGTERM a step over {grace / 2:g} s is given "
            f"up, and a save that is not done {max(0, grace - LAST_MOMENT_S):g} s later is lost",
            "ask for a longer KillWait, or keep steps short (train.batch_size) and set checkpoint.every_minutes lower",
        )


def _of_requeues(slurm: Slurm, launch: Launch) -> Iterator[Danger]:
    """What may keep a job from coming back, or bring it back too often."""
    if {"no-requeue", "no_requeue"} & set(launch.slurm):
        yield Danger(
            "launch.slurm.no-requeue: Slurm refuses to requeue the job, so a preemption or a time limit ends it",
            "leave it out, or go on by hand with `launch.py resume`",
        )
    if cancelling := ", ".join(_cancelling(slurm)):
        yield Danger(
            f"PreemptMode=CANCEL ({cancelling}): a preempted job comes back only if it requeues itself, as a run does, "
            f"within KillWait={slurm.kill_wait_s} s",
            "choose another one, or look with `launch.py status` and go on with `launch.py resume`",
        )
    if statuses := slurm.config.get("RequeueExit"):
        yield Danger(
            f"RequeueExit={statuses}: Slurm itself requeues a job that ends so, even when launch.max_failures is spent",
            "end such a run with `launch.py cancel`",
        )
    if statuses := slurm.config.get("RequeueExitHold"):
        yield Danger(
            f"RequeueExitHold={statuses}: Slurm holds a job that ends so in the queue",
            "let it go with `scontrol release`, or end it with `launch.py cancel`",
        )


def _cancelling(slurm: Slurm) -> Iterator[str]:
    """Where a job that is preempted is cancelled."""
    kind = slurm.config.get("PreemptType")
    if kind == "preempt/partition_prio":
        for partition in slurm.partitions:
            if "CANCEL" in partition["PreemptMode"]:
                yield f"partition {partition['PartitionName']}"
    elif kind == "preempt/qos" and "CANCEL" in slurm.config.get("PreemptMode", ""):
        yield "every QOS that does not say otherwise"


def of_place(place: Place, slurm: Slurm | None, launch: Launch, host: str) -> Iterator[Danger]:
    """What of the folder of all runs endangers one, as seen from `host`."""
    others = sorted({node.get("NodeHostName", host) for node in slurm.nodes} - {host}) if slurm else []
    if place.is_local and others:
        yield Danger(
            f"launch.root={place.path} is on {place.kind}, as a rule a disk of {host} alone, and jobs run on others, "
            f"e.g. {others[0]}",
            f"name a folder that all nodes share; `launch.py doctor --nodes {max(2, launch.node_counts[-1])}` tries it",
        )
    if place.no_locks is not None:
        yield Danger(
            f"launch.root={place.path}: locks do not work ({place.no_locks}), so a run may get two attempts at once",
            "name a folder where flock works between nodes (Lustre: mounted with flock), or never start a run twice",
        )
    if place.free_bytes < FREE_GB * 1e9:
        yield Danger(
            f"launch.root={place.path}: {place.free_bytes / 1e9:.1f} GB are free",
            "make room, lower checkpoint.keep_last and keep_best, or name another folder",
        )


def of_gpus(driver: int, torch: int) -> Iterator[Danger]:
    """GPUs of this machine that the driver knows, and those that torch can use."""
    if torch < driver:
        yield Danger(
            f"the driver has {driver} GPUs, but torch can use {torch}",
            "install a torch whose CUDA is not newer than the one that nvidia-smi shows",
        )

"""Checks before a start or a submission: refuse what this machine already knows will fail. Imports no torch."""

from __future__ import annotations

import os
import pwd
import re
import shutil
from pathlib import Path

from laststep.config.config import Config
from laststep.config.errors import ConfigError, nearest
from laststep.config.machine import Machine, Way
from laststep.config.schema import Launch
from laststep.ranks.slurm import SlurmError, check_conf, command, is_silent, own_nodes, scontrol, show_partitions
from laststep.runs.run_folders import PROJECT
from laststep.say import counted


def without_slurm() -> str:
    """What to do instead: a clone's Makefile has a Slurm to try, and nothing else does."""
    in_clone = Path.cwd() == PROJECT and (PROJECT / "Makefile").exists()
    return "add --local to train here" + (", or try a throwaway Slurm with `make slurm`" if in_clone else "")


def check(config: Config, machine: Machine) -> None:
    """Check that this machine, or its Slurm, has what the run asks for. Raises ConfigError."""
    if machine.way is Way.RANK:
        return  # the rank itself finds out about its machine
    if machine.is_here:
        check_local(config)
    else:
        check_submission(config)
    if machine.submits:
        check_slurm()
        check_partition(config.launch)
    if machine.submits or (machine.way is Way.DRY_RUN and not is_silent()):
        check_account(config.launch)


def check_slurm() -> None:
    """Check that Slurm's commands are here, find their configuration, and get an answer. Raises ConfigError."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise ConfigError(f"no Slurm on this machine (sbatch not found): {without_slurm()}")
    try:
        check_conf()
    except SlurmError as error:
        raise ConfigError(str(error)) from None
    if is_silent():
        raise ConfigError("Slurm does not answer (scontrol ping); try again later (--local would train one run here)")


def check_local(config: Config) -> None:
    """Check that this machine has the GPUs that a local run asks for. Raises ConfigError."""
    launch, here, own = config.launch, count_gpus(), own_nodes()
    if own is not None and launch.node_counts[0] > own.nodes:
        raise ConfigError(
            f"launch.nodes={launch.nodes}: this shell has {counted(own.nodes, 'node')} (job {own.job_id})"
        )
    if launch.spare_nodes:
        raise ConfigError(
            f"launch.spare_nodes={launch.spare_nodes}: --local has no other nodes; add launch.spare_nodes=0"
        )
    if own is not None:  # srun knows what the nodes have
        return
    if launch.gpus > here:
        fix = f"use --gpus-per-node {here}" if here else "leave it out to train on the CPU"
        if not launch.gpus_per_node:
            fix = f"{launch.gpus_key.partition('=')[0]}=null leaves it out"
        raise ConfigError(f"{launch.gpus_key}: this machine has {counted(here, 'GPU')}; {fix}")
    if config.device == "cuda" and not here:
        raise ConfigError("device=cuda: this machine has no GPU; use device=cpu or device=auto")


def check_submission(config: Config) -> None:
    """Check that a job that needs GPUs asks for some. Raises ConfigError."""
    if config.device == "cuda" and not config.launch.gpus:
        raise ConfigError("device=cuda: the job asks for no GPU; add --gpus-per-node N")


def check_partition(launch: Launch) -> None:
    """Check that the job's partition has as many nodes as it asks for. Raises ConfigError: such a job never starts."""
    names = launch.partition or os.environ.get("SBATCH_PARTITION")
    if {"clusters", "M"} & set(launch.slurm):  # another cluster's partition
        return
    partitions = [one for one in show_partitions(names) if one.get("TotalNodes", "").isdecimal()]
    most = max((int(one["TotalNodes"]) for one in partitions), default=None)
    fewest = int(launch.job_nodes.partition("-")[0])
    if most is not None and fewest > most:
        name = ",".join(one["PartitionName"] for one in partitions)
        spare = f" launch.spare_nodes={launch.spare_nodes}" if launch.spare_nodes else ""
        raise ConfigError(
            f"launch.nodes={launch.nodes}{spare}: partition {name} has {counted(most, 'node')}, so the job would never "
            f"start; use {'fewer' if spare else f'at most --nodes {most}'}, or another --partition"
        )


def check_account(launch: Launch) -> None:
    """Check the account and the QOS of the job by what Slurm's accounting has for this user. Raises ConfigError with
    the nearest valid name. Where there is none, or the controller does not insist on it, sbatch decides."""
    account, qos = launch.account or os.environ.get("SBATCH_ACCOUNT"), launch.qos or os.environ.get("SBATCH_QOS")
    if (account is None and qos is None) or {"clusters", "M"} & set(launch.slurm):
        return
    try:
        shown = scontrol("show", "config")
        enforced = re.search(r"^AccountingStorageEnforce\s*=\s*(\S+)", shown, re.MULTILINE)
        cluster = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.MULTILINE)
        if enforced is None or cluster is None or "associations" not in enforced[1]:
            return
        user = pwd.getpwuid(os.getuid()).pw_name
        where = (f"user={user}", f"cluster={cluster[1]}", "format=account,partition,qos")
        answer = command("sacctmgr", "--noheader", "--parsable2", "show", "associations", *where)
    except (SlurmError, KeyError):
        return
    rows = [row for line in answer.splitlines() if len(row := line.split("|")) == 3]
    accounts = list(dict.fromkeys(row[0] for row in rows))
    if account is not None and accounts and account.lower() not in accounts:
        raise ConfigError(f"launch.account={account}: you may not use such an account; {nearest(account, accounts)}")
    of_account = [row for row in rows if account is None or row[0] == account.lower()]
    known = list(dict.fromkeys(name for row in of_account for name in row[2].split(",") if name))
    if qos is not None and known and "qos" in enforced[1] and qos.lower() not in known:
        of = f" with account {account}" if account else ""
        raise ConfigError(f"launch.qos={qos}: you may not use such a QOS{of}; {nearest(qos, known)}")


def count_gpus() -> int:
    """The number of NVIDIA GPUs that a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0

"""Which process of an attempt this is, as its launcher says.

Each launcher leaves its ranks variables in their environment, and a small class for each reads them. The innermost one
is right (torchrun within srun: torchrun); what the others say must agree with it.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from submitit import JobEnvironment

from trainer.config.errors import ConfigError
from trainer.world.slurm_environment import Env, number, slurm_job, step_hosts, step_shares
from trainer.world.world import World, hostname

STARTED = time.strftime("%Y%m%d-%H%M%S")  # with the pid, names a process for good


class Launcher(ABC):
    """A way in which ranks are started."""

    name: ClassVar[str]
    variables: ClassVar[tuple[str, ...]] = ()  # which hold rank, size and local rank

    @classmethod
    @abstractmethod
    def answers(cls, env: Env) -> bool:
        """Whether it started the process that has this environment."""

    @classmethod
    @abstractmethod
    def world(cls, env: Env) -> World:
        """What it says. Raises ConfigError when it does not say all."""

    @classmethod
    def _world(
        cls,
        env: Env,
        job: str,
        local_size: int,
        node: int,
        nodes: int,
        hosts: tuple[str, ...] | None = None,
        restart: int = 0,
    ) -> World:
        """Put together what all launchers have in common. `job` names this use of the launcher, alike in all ranks, and
        `restart` says how often it has started all ranks again."""
        rank, size, local_rank = (number(env, name) for name in cls.variables) if cls.variables else (0, 1, 0)
        job = re.sub(r"[^A-Za-z0-9.]+", "-", f"{cls.name}-{job}")
        own = f"{job}-{restart}"
        on_slurm = "SLURM_JOB_ID" in env
        if on_slurm:
            job, restart = slurm_job(env)
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node=node,
            nodes=nodes,
            hosts=tuple(hostname() if other == rank else host for other, host in enumerate(hosts or [""] * size)),
            job_id=job,
            restart=restart,
            attempt=f"{job}-{restart}-{own}" if on_slurm else own,
            launcher=cls.name,
            on_slurm=on_slurm,
            variables=cls.variables,
        )


class Spawn(Launcher):
    """`python -m trainer --spawn N`, see trainer.cluster.spawn."""

    name = "spawn"
    variables = ("LASTSTEP_RANK", "LASTSTEP_WORLD_SIZE", "LASTSTEP_RANK")

    @classmethod
    def answers(cls, env: Env) -> bool:
        return "LASTSTEP_RANK" in env

    @classmethod
    def world(cls, env: Env) -> World:
        size = number(env, "LASTSTEP_WORLD_SIZE")
        hosts = (hostname(),) * size
        return cls._world(env, env["LASTSTEP_JOB"], local_size=size, node=0, nodes=1, hosts=hosts)


class Torchrun(Launcher):
    """torchrun (torch.distributed.elastic)."""

    name = "torchrun"
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

    @classmethod
    def answers(cls, env: Env) -> bool:
        return "TORCHELASTIC_RUN_ID" in env

    @classmethod
    def world(cls, env: Env) -> World:
        places = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        local_size, node, nodes = (number(env, name) for name in places)
        # Without --rdzv-id it is a UUID, of which the first part will do.
        job = re.sub(r"^([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", r"\1", env["TORCHELASTIC_RUN_ID"])
        restart, restarts = (number(env, f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        world = cls._world(env, job, local_size, node, nodes, restart=restart)
        return replace(world, starts_again=restart < restarts)


class Mpirun(Launcher):
    """Open MPI's mpirun. Within Slurm its ranks inherit the SLURM_ variables of its daemon, one on each node."""

    name = "mpirun"
    variables = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")

    @classmethod
    def answers(cls, env: Env) -> bool:
        return "OMPI_COMM_WORLD_RANK" in env

    @classmethod
    def world(cls, env: Env) -> World:
        rank, size, local_rank = (number(env, name) for name in cls.variables)
        local_size = number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
        # It numbers no nodes. With as many ranks on each, and filled one after the other, this is right; the ranks tell
        # each other their hosts when they meet.
        node, nodes = (rank - local_rank) // local_size, -(-size // local_size)
        return cls._world(env, env.get("PMIX_NAMESPACE", "unnamed"), local_size, node, nodes)


class Submitit(Launcher):
    """submitit's Slurm, local and debug executors, and our own local launcher, which speaks as the local one."""

    name = "submitit"

    @classmethod
    def answers(cls, env: Env) -> bool:
        try:
            return bool(JobEnvironment())
        except RuntimeError:  # submitit's word for "not inside a job of mine"
            return False

    @classmethod
    def world(cls, env: Env) -> World:
        job = JobEnvironment()
        on_slurm = job.name() == "slurm"
        restart = slurm_job(env)[1] if on_slurm else 0
        try:
            rank, size, local_rank = job.global_rank, job.num_tasks, job.local_rank
            node, nodes = job.node, job.num_nodes
        except ValueError as error:
            raise ConfigError(f"submitit-{job.name()} left a variable that should be a number: {error}") from None
        share, hosts = -(-size // nodes), job.hostnames
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=share,
            node=node,
            nodes=nodes,
            hosts=tuple(hosts[min(other // share, len(hosts) - 1)] for other in range(size)),
            job_id=job.job_id,
            restart=restart,
            attempt=f"{job.job_id}-{restart}",
            launcher=f"submitit-{job.name()}",
            on_slurm=on_slurm,
        )


class Srun(Launcher):
    """srun, within sbatch or salloc."""

    name = "srun"
    variables = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")

    @classmethod
    def answers(cls, env: Env) -> bool:
        return "SLURM_STEP_ID" in env  # the script of an sbatch has a SLURM_PROCID too

    @classmethod
    def world(cls, env: Env) -> World:
        node, shares = number(env, "SLURM_NODEID"), step_shares(env)
        if node >= len(shares):
            text = env.get("SLURM_STEP_TASKS_PER_NODE", "")
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text}: srun should have set it for each node")
        hosts = step_hosts(env, shares)
        return cls._world(env, f"step{env['SLURM_STEP_ID']}", shares[node], node, len(shares), hosts)


class Variables(Launcher):
    """Whatever sets torch's own variables (init_method env://), as the operators of Kubernetes do."""

    name = "env"
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

    @classmethod
    def answers(cls, env: Env) -> bool:
        return "RANK" in env and "WORLD_SIZE" in env

    @classmethod
    def world(cls, env: Env) -> World:
        env = {"LOCAL_RANK": env["RANK"], **env}
        rank, size, local_rank = (number(env, name) for name in cls.variables)
        local_size = number({"LOCAL_WORLD_SIZE": str(size), **env}, "LOCAL_WORLD_SIZE")
        node, nodes = (rank - local_rank) // local_size, -(-size // local_size)
        return cls._world(env, f"{env.get('MASTER_ADDR', '')}-{env.get('MASTER_PORT', '')}", local_size, node, nodes)


class Python(Launcher):
    """Plain python: no launcher."""

    name = "python"

    @classmethod
    def answers(cls, env: Env) -> bool:
        return True

    @classmethod
    def world(cls, env: Env) -> World:
        return cls._world(env, f"{STARTED}-{os.getpid()}", local_size=1, node=0, nodes=1)


# The innermost first. What has started a process may itself have been started by any that stands below it.
LAUNCHERS: tuple[type[Launcher], ...] = (Spawn, Torchrun, Mpirun, Submitit, Srun, Variables, Python)


def detect_world() -> World:
    """What the launcher of this process says; without one, a world of this process alone.

    Raises ConfigError when two launchers disagree, or one does not say all.
    """
    launcher = next(launcher for launcher in LAUNCHERS if launcher.answers(os.environ))
    world = launcher.world(os.environ)
    if world.rank >= world.size:
        raise ConfigError(f"{launcher.name} says rank {world.rank} of {world.size}: ranks count from 0")
    _check_claims(world, os.environ)
    return world


def _check_claims(world: World, env: Env) -> None:
    """Raise ConfigError when a variable of the environment names another number of ranks than the launcher."""
    if world.launcher == "spawn" or world.by_submitit:  # these are started from within anything
        return
    claims = {"Slurm": "SLURM_NTASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "PMI": "PMI_SIZE", "env": "WORLD_SIZE"}
    if world.launcher == "mpirun" and "SLURM_STEP_ID" in env:
        del claims["Slurm"]  # what it says there is the number of mpirun's daemons
    for who, variable in claims.items():
        said = env.get(variable, str(world.size))
        once_per_node = world.launcher == "torchrun" and said == str(world.nodes)
        if said == str(world.size) or once_per_node:
            continue
        ours = f"{world.launcher} says {world.variables[1]}={world.size}" if world.variables else "this is one process"
        fix = {
            "torchrun": "start torchrun once per node",
            "python": "put srun, torchrun or mpirun before it, or unset that",
        }.get(world.launcher, "make them agree")
        raise ConfigError(f"{ours}, but {who} says {variable}={said}: {fix}")

"""detect_world: which rank of an attempt this process is, from the environment variables that its launcher set.

A table has the launchers that differ only in the names of variables; the others have a function each. Where launchers
are nested (torchrun within srun), the innermost is right, and the others' variables must agree with it. Once the ranks
have met, `export_world` sets the variables by which code written for torchrun learns its rank. A process that a rank
starts inherits them. It is not that rank, so `detect_world` forgets them first.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from submitit import JobEnvironment
from submitit.slurm.slurm import SlurmParseException

from laststep import compat
from laststep.config.errors import ConfigError
from laststep.ranks.slurm import ON_NODES
from laststep.ranks.world import World, hostname

STARTED = time.strftime("%Y%m%d-%H%M%S")  # with the process id, a name that is unique to this process

# Set in a job that runs a copy of the code: the folder in which its ranks work.
WORKING_FOLDER = "LASTSTEP_WORKING_FOLDER"
# Set by a launcher that outlives the ranks and may start them again: how often it has done so in this allocation.
RESTARTS = "LASTSTEP_RESTARTS"
# Set by the supervisor of a rank: how often it has started the rank again, see laststep.job.supervisor.
STEP_RESTARTS = "LASTSTEP_STEP_RESTARTS"
# Set in a job that chooses its nodes: the one on which its batch shell runs.
BATCH_HOST = "LASTSTEP_BATCH_HOST"

# Set by a batch shell that acts where laststep.job.after_ranks cannot: a file to delete once that has decided.
UNDECIDED = "LASTSTEP_UNDECIDED"


Env = Mapping[str, str]


class Launcher(NamedTuple):
    """A launcher that sets environment variables in each rank; here are their names."""

    name: str
    marks: tuple[str, ...]  # with which a process knows that this launcher started it
    place: tuple[str, ...]  # rank, size, local rank, local size
    job: tuple[str, ...]  # name this use of the launcher, the same in all ranks
    node: str = ""  # empty, as `nodes`: see `_world_by`
    nodes: str = ""
    restart: str = ""  # how often the launcher itself has started all ranks again
    most_restarts: str = ""


def _like_torchrun(prefix: str = "") -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


# Our own: `python -m laststep --spawn N`, see laststep.submission.local.
SPAWN = Launcher("spawn", ("LASTSTEP_RANK",), ("LASTSTEP_RANK", "LASTSTEP_WORLD_SIZE") * 2, ("LASTSTEP_JOB",))
RAY = Launcher(  # Ray Train, see laststep.frameworks.ray: in each of its workers, which Ray itself starts again
    "ray",
    ("LASTSTEP_RAY_RANK",),
    _like_torchrun("LASTSTEP_RAY_"),
    ("LASTSTEP_RAY_JOB",),
    node="LASTSTEP_RAY_NODE_RANK",
    restart="LASTSTEP_RAY_RESTARTS",
)
TORCHRUN = Launcher(  # torch.distributed.elastic
    "torchrun",
    ("TORCHELASTIC_RUN_ID",),
    _like_torchrun(),
    ("TORCHELASTIC_RUN_ID",),
    node="GROUP_RANK",
    nodes="GROUP_WORLD_SIZE",
    restart="TORCHELASTIC_RESTART_COUNT",
    most_restarts="TORCHELASTIC_MAX_RESTARTS",
)
MPIRUN = Launcher(  # Open MPI's. In a Slurm job it runs a daemon on each node; the ranks inherit its SLURM_ variables
    "mpirun",
    ("OMPI_COMM_WORLD_RANK",),
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMIX_NAMESPACE",),
)
# Anything else that sets torch's own variables (init_method env://), such as operators of Kubernetes.
TORCH_VARIABLES = Launcher("env", ("RANK", "WORLD_SIZE"), _like_torchrun(), ("MASTER_ADDR", "MASTER_PORT"))


def detect_world() -> World:
    """This process's place among the ranks, from its environment; without a launcher, a world of one rank. Raises
    ConfigError when two launchers disagree, or when a variable is missing or not a number."""
    forget_exported()
    env = os.environ
    if het_size := env.get("SLURM_HET_SIZE"):
        raise ConfigError(f"SLURM_HET_SIZE={het_size}: a run cannot be a heterogeneous job; all its nodes are alike")
    # The innermost first: each of these may itself have been started by any that follows it.
    if inner := next((one for one in (SPAWN, RAY, TORCHRUN, MPIRUN) if _has_started(one, env)), None):
        world = _world_by(inner, env)
    elif job := _submitit_job():
        world = _submitit_world(job, env)
    elif slurm_step(env) is not None:  # SLURM_PROCID is set in the script of an sbatch too
        world = _srun_world(env)
    elif _has_started(TORCH_VARIABLES, env):
        defaults = {"LOCAL_RANK": env["RANK"], "LOCAL_WORLD_SIZE": env["WORLD_SIZE"]}
        world = _world_by(TORCH_VARIABLES, {**defaults, **env})
    else:  # plain python
        started = f"{STARTED}-{os.getpid()}"
        world = _world(env, "python", started, rank=0, size=1, local_rank=0, local_size=1, node=0, nodes=1)
    if world.rank >= world.size:
        raise ConfigError(f"{world.launcher} says rank {world.rank} of {world.size}: ranks count from 0")
    _check_agreement(world, env)
    return world


def _has_started(launcher: Launcher, env: Env) -> bool:
    return all(name in env for name in launcher.marks)


def _world_by(launcher: Launcher, env: Env) -> World:
    """The world as this launcher's variables describe it."""
    rank, size, local_rank, local_size = (read_int(env, name) for name in launcher.place)
    restart = read_int(env, launcher.restart) if launcher.restart else 0
    job = "-".join(env.get(name, "") for name in launcher.job) or "unnamed"
    world = _world(
        env,
        launcher.name,
        # torchrun's is a UUID unless --rdzv-id names it; its first part is unique enough.
        re.sub(r"^([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", r"\1", job),
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        # Where a launcher does not number or count the nodes. This is right when every node has the same number of
        # ranks and they are filled one after the other. The ranks exchange their real hosts when they meet.
        node=read_int(env, launcher.node) if launcher.node else (rank - local_rank) // local_size,
        nodes=read_int(env, launcher.nodes) if launcher.nodes else -(-size // local_size),
        hosts=(hostname(),) * size if launcher is SPAWN else None,
        variables=launcher.place[:3],
        restart=restart,
    )
    most = read_int(env, launcher.most_restarts) if launcher.most_restarts else 0
    return replace(world, launcher_restarts=restart < most)


def _world(
    env: Env,
    launcher: str,
    job: str,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    node: int,
    nodes: int,
    hosts: tuple[str, ...] | None = None,
    variables: tuple[str, ...] = (),
    restart: int = 0,
) -> World:
    """What all launchers but submitit have in common. `job` names this use of the launcher, the same in all ranks.
    `hosts` is None if the launcher does not say. `variables` hold rank, size and local rank. `restart`: how often the
    launcher itself has started all ranks again."""
    job = re.sub(r"[^A-Za-z0-9.]+", "-", f"{launcher}-{job}")
    launch = f"{job}-{restart}"
    on_slurm = "SLURM_JOB_ID" in env
    if on_slurm:
        job, restart = slurm_job(env)
    step_id = restarts_in_place(env)
    if step_id:  # a launcher may give all its starts in one allocation the same name
        launch = f"{launch}-{step_id}"
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        hosts=tuple(hostname() if other == rank else host for other, host in enumerate(hosts or ("",) * size)),
        job_id=job,
        restart=restart,
        attempt=f"{job}-{restart}-{launch}" if on_slurm else launch,
        launcher=launcher,
        on_slurm=on_slurm,
        step_id=step_id,
        supervised=RESTARTS in env,
        variables=variables,
    )


def _submitit_job() -> JobEnvironment | None:
    """The job of submitit's that started this process: of its Slurm, local and debug executors, and of our own local
    launcher, which sets the local one's variables."""
    with contextlib.suppress(RuntimeError):  # there is none
        return JobEnvironment()
    return None


def _submitit_world(job: JobEnvironment, env: Env) -> World:
    on_slurm = job.name() == "slurm"
    try:
        rank, size, local_rank = job.global_rank, job.num_tasks, job.local_rank
        node, nodes = job.node, job.num_nodes
    except ValueError as error:
        raise ConfigError(f"submitit-{job.name()} set a variable that should be a number: {error}") from None
    restart = slurm_job(env)[1] if on_slurm else 0
    step_id = slurm_step(env) if on_slurm else restarts_in_place(env)
    hosts = job.hostnames
    if (on_slurm or ON_NODES in env) and "SLURM_STEP_NODELIST" in env:  # the step may have fewer nodes than the job
        hosts = compat.step_hostnames()
        nodes = len(hosts)
    per_node = -(-size // nodes)
    step = "" if step_id is None else f"-{step_id}"
    again = read_int(env, STEP_RESTARTS) if STEP_RESTARTS in env else None
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=per_node,
        node=node,
        nodes=nodes,
        hosts=tuple(hosts[min(other // per_node, len(hosts) - 1)] for other in range(size)),
        job_id=job.job_id,
        restart=restart,
        attempt=f"{job.job_id}-{restart}{step}" + (f"-{again}" if again else ""),
        launcher=f"submitit-{job.name()}",
        on_slurm=on_slurm,
        step_id=step_id,
        step_restarts=again,
        supervised=RESTARTS in env,
    )


def _srun_world(env: Env) -> World:
    """Slurm's srun, within sbatch or salloc."""
    variables = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    rank, size, local_rank = (read_int(env, name) for name in variables)
    node, per_node = read_int(env, "SLURM_NODEID"), step_tasks_per_node(env)
    if node >= len(per_node):
        text = env.get("SLURM_STEP_TASKS_PER_NODE", "")
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text}: srun should have set it for each node")
    world = _world(
        env,
        "srun",
        f"step{env['SLURM_STEP_ID']}",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=per_node[node],
        node=node,
        nodes=len(per_node),
        hosts=step_task_hosts(env, per_node),
        variables=variables,
    )
    return replace(world, step_id=slurm_step(env))


def restarts_in_place(env: Env) -> int | None:
    """How often the ranks were started again in this allocation; None where nothing would start them again."""
    return read_int(env, RESTARTS) if RESTARTS in env else None


def _check_agreement(world: World, env: Env) -> None:
    """Raise ConfigError when a variable of another launcher gives a different number of ranks."""
    if world.launcher == "spawn" or world.by_submitit:  # they may run inside any other launcher
        return
    claims = {"Slurm": "SLURM_NTASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "PMI": "PMI_SIZE", "env": "WORLD_SIZE"}
    if world.launcher == "mpirun" and slurm_step(env) is not None:
        del claims["Slurm"]  # there it is the number of mpirun's daemons
    for who, variable in claims.items():
        claim = env.get(variable, str(world.size))
        once_per_node = world.launcher == "torchrun" and claim == str(world.nodes)
        if claim == str(world.size) or once_per_node:
            continue
        ours = (
            f"{world.launcher} says {world.variables[1]}={world.size}"
            if world.variables
            else "this is a single process"
        )
        fix = {
            "torchrun": "start torchrun once per node",
            "python": f"start it with srun, torchrun or mpirun, or unset {variable}",
        }.get(world.launcher, "make them agree")
        raise ConfigError(f"{ours}, but {who} says {variable}={claim}: {fix}")


def read_int(env: Env, variable: str) -> int:
    """A number that the launcher should have set. Raises ConfigError when it is missing or not a number."""
    value = env.get(variable, "")
    if not value.isdecimal():
        raise ConfigError(f"{variable}={value or '(not set)'}: the launcher should have set it to a number")
    return int(value)


def slurm_job(env: Env) -> tuple[str, int]:
    """The Slurm id of this process's job, such as 12, or 12_3 in an array, and how often the job was requeued."""
    job_id = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in env:
        job_id = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return job_id, read_int({"SLURM_RESTART_COUNT": "0", **env}, "SLURM_RESTART_COUNT")


def slurm_step(env: Env) -> int | None:
    """The number of the step that this process is a task of; None in the shell of a batch script, where Slurm 26.05
    sets SLURM_STEP_ID to -5."""
    return int(env["SLURM_STEP_ID"]) if env.get("SLURM_STEP_ID", "").isdecimal() else None


def step_tasks_per_node(env: Env) -> list[int]:
    """The number of tasks on each node of the step: [2, 2, 2, 1] for SLURM_STEP_TASKS_PER_NODE=2(x3),1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def step_task_hosts(env: Env, tasks_per_node: Sequence[int]) -> tuple[str, ...] | None:
    """The node of each task of the step. None when srun distributed them neither block by block nor in turn."""
    names: list[str] = []
    with contextlib.suppress(SlurmParseException):
        names = compat.step_hostnames()
    distribution = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
    if distribution not in ("block", "cyclic") or len(names) != len(tasks_per_node):
        return None
    tasks = [(turn, node) for node, count in enumerate(tasks_per_node) for turn in range(count)]
    return tuple(names[node] for _, node in (sorted(tasks) if distribution == "cyclic" else tasks))


# The id of the process that has set all of VARIABLES, and the MASTER_ADDR:MASTER_PORT that it has set.
EXPORTED = "LASTSTEP_EXPORTED"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def export_world(world: World, host: str, port: int) -> Callable[[], None]:
    """Set VARIABLES, after the ranks have met, as MASTER_ADDR says where they meet. Call what this returns to put back
    what was there before.

    `host` is rank 0's, `port` one that is free there: torch's own code connects to the process group that exists, but
    a script may serve a store of its own. torchrun has set all of them itself, and serves a store there.
    """
    if world.launcher == "torchrun":
        return lambda: None
    values = (world.rank, world.size, world.local_rank, world.local_size, host, port)
    before = {name: os.environ.get(name) for name in (*VARIABLES, EXPORTED)}
    if world.launcher == "env":  # a user has set most of them
        for name, value in zip(VARIABLES, values):
            os.environ.setdefault(name, str(value))
    else:
        os.environ.update(zip(VARIABLES, map(str, values)), LASTSTEP_EXPORTED=f"{os.getpid()}:{host}:{port}")

    def undo() -> None:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return undo


def forget_exported() -> None:
    """Remove the variables that a rank which started this process has set, unless a launcher has set them anew."""
    exported = os.environ.get(EXPORTED, "")
    if not exported or exported.startswith(f"{os.getpid()}:"):  # this process is that rank
        return
    del os.environ[EXPORTED]
    if exported.partition(":")[2] == f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}":
        for name in VARIABLES:
            os.environ.pop(name, None)


def free_port() -> int:
    """A port of this host at which nothing listens."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def address_towards(host: str) -> str:
    """The address of this host that packets to another host carry; empty if its name does not resolve."""
    with contextlib.suppress(OSError, UnicodeError):
        # The port is "discard": nothing is sent there.
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(place)
            return str(unsent.getsockname()[0])
    return ""

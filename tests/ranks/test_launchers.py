"""detect_world, from recorded environments of Slurm 22.05, Open MPI 4.1, torch 2.15 and submitit 1.5.4."""

from __future__ import annotations

import os
import socket

import pytest

from laststep.config.errors import ConfigError
from laststep.ranks import disk
from laststep.ranks.launchers import detect_world
from laststep.ranks.world import World

# As recorded in a rank, without the variables that do not concern ranks.
SRUN = """\
SLURM_JOB_ID=10 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4 SLURM_STEP_ID=0
SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_DISTRIBUTION=block
SLURM_NODEID=1 SLURM_LOCALID=0 SLURM_PROCID=2 SLURMD_NODENAME=n2"""
UNEVEN = """\
SLURM_JOB_ID=12 SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3 SLURM_NTASKS=5 SLURM_STEP_ID=0
SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_DISTRIBUTION=block
SLURM_NODEID=2 SLURM_LOCALID=0 SLURM_PROCID=4 SLURMD_NODENAME=n3"""
CYCLIC = """\
SLURM_JOB_ID=14 SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3 SLURM_NTASKS=5 SLURM_STEP_ID=0
SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=3,1(x2) SLURM_DISTRIBUTION=cyclic
SLURM_NODEID=0 SLURM_LOCALID=1 SLURM_PROCID=3 SLURMD_NODENAME=n1"""
SUBSET = """\
SLURM_JOB_ID=14 SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3 SLURM_NTASKS=2 SLURM_STEP_ID=1
SLURM_STEP_NODELIST=n[2-3] SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_DISTRIBUTION=block
SLURM_NODEID=0 SLURM_LOCALID=0 SLURM_PROCID=0 SLURMD_NODENAME=n2"""
BATCH = """\
SLURM_JOB_ID=10 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4 SLURM_NODEID=0 SLURM_LOCALID=0
SLURM_PROCID=0 SLURMD_NODENAME=n1"""
SALLOC = "SLURM_JOB_ID=13 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=2"
LEFT = "SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_NUM_NODES=3 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=n[1,3] SLURMD_NODENAME=n3"
ARRAY = "SLURM_ARRAY_JOB_ID=11 SLURM_ARRAY_TASK_ID=3 SLURM_RESTART_COUNT=2"
TORCHRUN = """\
RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 MASTER_ADDR=localhost
MASTER_PORT=33441 TORCHELASTIC_RUN_ID=2da0403a-d28d-49ae-b96c-a6ff21edb91b TORCHELASTIC_RESTART_COUNT=0
TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=True"""
TORCHRUN_PER_NODE = """\
RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=16
TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 SLURM_JOB_ID=16 SLURM_JOB_NODELIST=n[1-2]
SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=2
SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_DISTRIBUTION=cyclic SLURM_NODEID=1 SLURM_LOCALID=0 SLURM_PROCID=1
SLURMD_NODENAME=n2"""
MPIRUN = """\
OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
PMIX_NAMESPACE=2112749569 PMIX_RANK=1"""
# mpirun's daemons are a Slurm step, and the ranks inherit the variables of that step.
MPIRUN_IN_SBATCH = """\
OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2
PMIX_NAMESPACE=2105802753 SLURM_JOB_ID=10 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=2
SLURM_STEP_ID=2 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)
SLURM_NODEID=1 SLURM_LOCALID=0 SLURM_PROCID=1 SLURMD_NODENAME=n2"""
SUBMITIT = f"{SRUN} SUBMITIT_EXECUTOR=slurm SUBMITIT_FOLDER=/runs/first/logs"
LOCAL = """\
SUBMITIT_EXECUTOR=local SUBMITIT_LOCAL_JOB_ID=13755 SUBMITIT_LOCAL_NTASKS=2 SUBMITIT_LOCAL_JOB_NUM_NODES=1
SUBMITIT_LOCAL_NODEID=0 SUBMITIT_LOCAL_GLOBALID=1 SUBMITIT_LOCAL_LOCALID=1"""
DEBUG = "SUBMITIT_DEBUG_JOB_ID=DEBUG_139"
SPAWN = "LASTSTEP_RANK=1 LASTSTEP_WORLD_SIZE=3 LASTSTEP_JOB=20261121-160000-77"
RAY = """\
LASTSTEP_RAY_RANK=3 LASTSTEP_RAY_WORLD_SIZE=4 LASTSTEP_RAY_LOCAL_RANK=1 LASTSTEP_RAY_LOCAL_WORLD_SIZE=2
LASTSTEP_RAY_NODE_RANK=1 LASTSTEP_RAY_RESTARTS=2 LASTSTEP_RAY_JOB=20261122-180000-77"""
ENV = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=2345"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without any launcher, on a host named `here`."""
    ours = (
        "SLURM",
        "SUBMITIT_",
        "TORCHELASTIC_",
        "OMPI_",
        "PMI",
        "LASTSTEP_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
    )
    for name in [name for name in os.environ if name.startswith(ours)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")


def detect(monkeypatch: pytest.MonkeyPatch, *environments: str) -> World:
    """The World for these environments; later ones add to earlier ones, and a name without = removes that variable."""
    for word in " ".join(environments).split():
        name, given, value = word.partition("=")
        monkeypatch.setenv(name, value) if given else monkeypatch.delenv(name)
    return detect_world()


@pytest.mark.parametrize(
    ("environment", "place", "hosts", "attempt"),
    [
        (SRUN, "2/4 local 0/2 node 1/2", "n1 n1 n2 n2", "10-0-srun-step0-0"),
        (UNEVEN, "4/5 local 0/1 node 2/3", "n1 n1 n2 n2 n3", "12-0-srun-step0-0"),
        (CYCLIC, "3/5 local 1/3 node 0/3", "n1 n2 n3 n1 n1", "14-0-srun-step0-0"),
        (f"{CYCLIC} SLURM_DISTRIBUTION=plane", "3/5 local 1/3 node 0/3", "? ? ? n1 ?", "14-0-srun-step0-0"),
        (f"{SRUN} SLURM_STEP_NODELIST=n[1-", "2/4 local 0/2 node 1/2", "? ? n2 ?", "10-0-srun-step0-0"),
        (SUBSET, "0/2 local 0/1 node 0/2", "n2 n3", "14-0-srun-step1-0"),
        (f"{SRUN} {ARRAY}", "2/4 local 0/2 node 1/2", "n1 n1 n2 n2", "11_3-2-srun-step0-0"),
        (TORCHRUN, "1/2 local 1/2 node 0/1", "? here", "torchrun-2da0403a-0"),
        (f"{TORCHRUN} TORCHELASTIC_RESTART_COUNT=1", "1/2 local 1/2 node 0/1", "? here", "torchrun-2da0403a-1"),
        (TORCHRUN_PER_NODE, "3/4 local 1/2 node 1/2", "? ? ? n2", "16-0-torchrun-16-0"),
        (MPIRUN, "1/2 local 1/2 node 0/1", "? here", "mpirun-2112749569-0"),
        (MPIRUN_IN_SBATCH, "2/4 local 0/2 node 1/2", "? ? n2 ?", "10-0-mpirun-2105802753-0"),
        (SUBMITIT, "2/4 local 0/2 node 1/2", "n1 n1 n2 n2", "10-0-0"),
        (f"{SUBMITIT} {LEFT}", "2/4 local 0/2 node 1/2", "n1 n1 n3 n3", "10-0-1"),  # n2 is dead, or a spare node
        (f"{SUBMITIT} {ARRAY}", "2/4 local 0/2 node 1/2", "n1 n1 n2 n2", "11_3-2-0"),
        (LOCAL, "1/2 local 1/2 node 0/1", "here here", "13755-0"),
        (DEBUG, "0/1 local 0/1 node 0/1", "here", "DEBUG_139-0"),
        (SPAWN, "1/3 local 1/3 node 0/1", "here here here", "spawn-20261121-160000-77-0"),
        (RAY, "3/4 local 1/2 node 1/2", "? ? ? here", "ray-20261122-180000-77-2"),
        (ENV, "3/4 local 1/2 node 1/2", "? ? ? here", "env-node0-2345-0"),
        ("RANK=1 WORLD_SIZE=2", "1/2 local 1/2 node 0/1", "? here", "env--0"),
        # Nested launchers: the innermost is right.
        (f"{SRUN} {TORCHRUN} SLURM_NTASKS=1", "1/2 local 1/2 node 0/1", "? n2", "10-0-torchrun-2da0403a-0"),
        (f"{SUBMITIT} {TORCHRUN} SLURM_NTASKS=1", "1/2 local 1/2 node 0/1", "? n2", "10-0-torchrun-2da0403a-0"),
        (f"{SALLOC} {LOCAL}", "1/2 local 1/2 node 0/1", "here here", "13755-0"),
        (f"{SALLOC} {SPAWN}", "1/3 local 1/3 node 0/1", "here here here", "13-0-spawn-20261121-160000-77-0"),
        (f"{BATCH} {TORCHRUN} WORLD_SIZE=4", "1/4 local 1/2 node 0/1", "? n1 ? ?", "10-0-torchrun-2da0403a-0"),
    ],
)
def test_place(monkeypatch: pytest.MonkeyPatch, environment: str, place: str, hosts: str, attempt: str) -> None:
    """Each rank must find its own place, and the same name for the attempt as the others, or the ranks do not meet."""
    world = detect(monkeypatch, environment)
    found = f"{world.rank}/{world.size} local {world.local_rank}/{world.local_size} node {world.node}/{world.nodes}"
    assert (found, " ".join(host or "?" for host in world.hosts), world.attempt) == (place, hosts, attempt)


@pytest.mark.parametrize(
    "launcher", [SRUN, SUBMITIT, TORCHRUN_PER_NODE, MPIRUN_IN_SBATCH, f"{LOCAL} LASTSTEP_RESTARTS=0"]
)
def test_starts_in_one_allocation(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """Every file that the ranks meet by is named after the attempt: two starts in the same job must not share one."""
    first = detect(monkeypatch, launcher)
    again = detect(monkeypatch, launcher, "LASTSTEP_RESTARTS=3", "SLURM_STEP_ID=3" if "SLURM" in launcher else "")
    assert (again.job_id, again.restart, again.step_id) == (first.job_id, first.restart, 3)
    assert again.supervised and again.attempt != first.attempt
    assert disk.lock_signature(again) != disk.lock_signature(first)
    assert disk.signed_by_job(disk.lock_signature(first), again)


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher, each start is a new attempt."""
    world = detect(monkeypatch)
    assert (world.rank, world.size, world.launcher) == (0, 1, "python")
    assert world.attempt.endswith(f"-{os.getpid()}-0") and not world.on_slurm


@pytest.mark.parametrize(
    ("environment", "job", "on_slurm"),
    [
        (f"{SRUN} SLURM_RESTART_COUNT=1", ("10", 1), True),
        (f"{SUBMITIT} SLURM_RESTART_COUNT=1", ("10", 1), True),
        (f"{TORCHRUN_PER_NODE} SLURM_RESTART_COUNT=1 TORCHELASTIC_RESTART_COUNT=2", ("16", 1), True),
        (f"{BATCH} SLURM_NTASKS=1", ("10", 0), True),
        (f"{BATCH} SLURM_NTASKS=1 SLURM_STEP_ID=-5", ("10", 0), True),
        (f"{SALLOC} {LOCAL}", ("13755", 0), False),
        (f"{TORCHRUN} TORCHELASTIC_RESTART_COUNT=2", ("torchrun-2da0403a", 2), False),
        (MPIRUN, ("mpirun-2112749569", 0), False),
    ],
)
def test_job(monkeypatch: pytest.MonkeyPatch, environment: str, job: tuple[str, int], on_slurm: bool) -> None:
    """In a Slurm job, the job is Slurm's: a stop requeues it, and the retry budgets are counted per job."""
    world = detect(monkeypatch, environment)
    assert ((world.job_id, world.restart), world.on_slurm) == (job, on_slurm)


def test_torchrun_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job must not be requeued if torchrun will restart its ranks; after torchrun's last restart it must be."""
    assert not detect(monkeypatch, TORCHRUN_PER_NODE).launcher_restarts
    assert detect(monkeypatch, "TORCHELASTIC_MAX_RESTARTS=2 TORCHELASTIC_RESTART_COUNT=1").launcher_restarts
    assert not detect(monkeypatch, "TORCHELASTIC_RESTART_COUNT=2").launcher_restarts


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        (f"{SRUN} WORLD_SIZE=8", "srun says SLURM_STEP_NUM_TASKS=4, but env says WORLD_SIZE=8: make them agree"),
        (BATCH, "this is a single process, but Slurm says SLURM_NTASKS=4: start it with srun, torchrun or mpirun"),
        (SALLOC, "this is a single process, but Slurm says SLURM_NTASKS=2"),
        (f"{TORCHRUN} {BATCH}", "torchrun says WORLD_SIZE=2, but Slurm says SLURM_NTASKS=4: start torchrun once per"),
        # Slurm 26.05 gives the batch script a step, too: no srun has started this process, nor mpirun's daemons.
        (f"{BATCH} SLURM_STEP_ID=-5", "this is a single process, but Slurm says SLURM_NTASKS=4"),
        (f"{MPIRUN} {BATCH} SLURM_STEP_ID=-5", "mpirun says OMPI_COMM_WORLD_SIZE=2, but Slurm says SLURM_NTASKS=4"),
        (f"{MPIRUN} {BATCH}", "mpirun says OMPI_COMM_WORLD_SIZE=2, but Slurm says SLURM_NTASKS=4: make them agree"),
        (f"{MPIRUN} WORLD_SIZE=4", "mpirun says OMPI_COMM_WORLD_SIZE=2, but env says WORLD_SIZE=4"),
        (f"{ENV} PMI_SIZE=2", "env says WORLD_SIZE=4, but PMI says PMI_SIZE=2"),
        ("WORLD_SIZE=4", "this is a single process, but env says WORLD_SIZE=4"),
        ("PMI_SIZE=2 PMI_RANK=1", "this is a single process, but PMI says PMI_SIZE=2"),
        # A variable that is missing or garbled.
        (f"{SRUN} SLURM_PROCID", "SLURM_PROCID=(not set): the launcher should have set it to a number"),
        (f"{SRUN} SLURM_STEP_NUM_TASKS=many", "SLURM_STEP_NUM_TASKS=many: the launcher should have set it"),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE=: srun should have set it for each node"),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=4", "SLURM_STEP_TASKS_PER_NODE=4: srun should have set it for each node"),
        (f"{SRUN} SLURM_RESTART_COUNT=-1", "SLURM_RESTART_COUNT=-1: the launcher should have set it to a number"),
        (f"{SRUN} SLURM_PROCID=4", "srun says rank 4 of 4: ranks count from 0"),
        (f"{TORCHRUN} LOCAL_RANK", "LOCAL_RANK=(not set): the launcher should have set it to a number"),
        (f"{TORCHRUN} GROUP_WORLD_SIZE=two", "GROUP_WORLD_SIZE=two: the launcher should have set it to a number"),
        (f"{MPIRUN} OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE=(not set): the launcher should have set it"),
        (f"{ENV} LOCAL_WORLD_SIZE=x", "LOCAL_WORLD_SIZE=x: the launcher should have set it to a number"),
        (f"{ENV} RANK=4", "env says rank 4 of 4: ranks count from 0"),
        (f"{SPAWN} LASTSTEP_WORLD_SIZE", "LASTSTEP_WORLD_SIZE=(not set): the launcher should have set it"),
        (f"{SRUN} SLURM_HET_SIZE=2", "SLURM_HET_SIZE=2: a run cannot be a heterogeneous job; all its nodes are alike"),
        (f"{SUBMITIT} SLURM_PROCID=x", "submitit-slurm set a variable that should be a number: "),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, environment: str, word: str) -> None:
    """One line names what is wrong: a rank that guessed would train alone, or on the wrong share of the data."""
    with pytest.raises(ConfigError) as error:
        detect(monkeypatch, environment)
    assert str(error.value).startswith(word) and "\n" not in str(error.value)

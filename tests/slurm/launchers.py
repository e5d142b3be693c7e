"""Every way to start ranks, as a user would: what is typed, what stops it, and a mistake that must not pass unseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laststep.config.config import Config
from tests.support.runs import undisturbed_run

# 7 steps an epoch. tests.support.tasks.AwaitsStop can be stopped in the eighth step of each attempt, so once in two
# epochs.
SMALL = (
    "device=cpu", "data.name=fake", "data.args.samples=52", "data.args.classes=3", "data.args.image_size=8",
    "train.batch_size=8", "optim.lr=0.02",
)  # fmt: skip
# 40 steps an epoch, a checkpoint after each. A step of two ranks takes 80 ms and hardly any CPU time, since each sample
# is read from a slow disk: a test can interrupt the run at a given step, whatever else the machine does.
UNHURRIED = (
    "task=tests.support.tasks.Unhurried", "device=cpu", "data.name=fake", "data.args.samples=320",
    "data.args.classes=3", "data.args.image_size=8", "train.batch_size=8", "train.max_steps=120", "optim.lr=0.02",
)  # fmt: skip
IN_EPOCH_2 = "step 50/120"
TRAIN = ("python", "-m", "laststep", "--name={run}")
ONE_CPU = ("--cpus-per-task=1",)  # a thread per rank, as all ranks that are forked have
AGENT = ("torchrun", "--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", "--master-port={port}")
RANK = ("env", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT={port}")
# One of submitit's executors, in a user's own program.
PROGRAM = """\
import submitit, sys
from laststep import Config, Trainer
executor = submitit.{executor}("runs/{{run}}/logs")
executor.update_parameters({parameters})
job = executor.submit(Trainer(Config.load("mnist", [*sys.argv[1:], "launch.name={{run}}"])))
print("its result is of step", job.results()[0]["step"])
"""


@dataclass(frozen=True)
class Launcher:
    """One way to start ranks.

    `typed` is a command, or several, each typed in its own terminal; key=value words are added to them. A stop is a
    Slurm command, or a signal to the commands or to the ranks, see `Desk.stop`.
    """

    name: str
    typed: tuple[tuple[str, ...], ...]
    stops: tuple[str, ...]
    shown: str  # the command as shown in the table
    size: int = 2
    returns: bool = False  # whether the run starts again by itself after a stop
    results: bool = False  # whether Python code can ask for the run's result
    mistake: tuple[str, ...] = ()  # a command whose ranks contradict the launcher around them
    plain: bool = False  # whether only Python itself will do: submitit names a local job after its process
    refusal: str = ""  # the error message for that mistake; or the reason why no mistake is possible


LAUNCHERS = (
    Launcher(
        "python",
        (TRAIN,),
        ("INT",),
        shown="python -m laststep",
        size=1,
        mistake=("sbatch", "--ntasks=4", "--output={run}.out", "--wrap", " ".join(TRAIN)),
        refusal="this is a single process, but Slurm says SLURM_NTASKS=4: start it with srun, torchrun or mpirun, or "
        "unset SLURM_NTASKS",
    ),
    Launcher(
        "--spawn",
        ((*TRAIN, "--spawn=2"),),
        ("TERM",),
        shown="python -m laststep --spawn 2",
        refusal="starts its own ranks, whatever launcher it runs in",
    ),
    Launcher(
        "torchrun",
        (("bash", "{examples}/torchrun.sh", "--name={run}"),),
        ("TERM",),
        shown="bash examples/torchrun.sh",
        mistake=("mpirun", "-np", "2", "torchrun", "--standalone", *TRAIN[1:]),
        refusal="torchrun says WORLD_SIZE=1, but mpirun says OMPI_COMM_WORLD_SIZE=2: start torchrun once per node",
    ),
    Launcher(
        "torchrun, once per node by hand",
        ((*AGENT, "--node-rank=0", *TRAIN[1:]), (*AGENT, "--node-rank=1", *TRAIN[1:])),
        ("INT",),
        shown="torchrun --nnodes 2 --node-rank 0 ... and 1",
        mistake=("salloc", "--ntasks=4", *AGENT[:1], "--standalone", "--nproc-per-node=2", *TRAIN[1:]),
        refusal="torchrun says WORLD_SIZE=2, but Slurm says SLURM_NTASKS=4: start torchrun once per node",
    ),
    Launcher(
        "torchrun, once per node under srun",
        (("sbatch", *ONE_CPU, "--job-name={run}", "{examples}/torchrun.sbatch"),),
        ("scancel --signal=USR2", "scontrol requeue"),
        shown="sbatch examples/torchrun.sbatch",
        returns=True,
        mistake=("sbatch", *ONE_CPU, "--job-name={run}", "--ntasks-per-node=2", "{examples}/torchrun.sbatch"),
        refusal="torchrun says WORLD_SIZE=2, but Slurm says SLURM_NTASKS=4: start torchrun once per node",
    ),
    Launcher(
        "srun in sbatch",
        (("sbatch", *ONE_CPU, "--job-name={run}", "{examples}/srun.sbatch"),),
        ("scancel --signal=USR2", "scontrol requeue"),
        shown="sbatch examples/srun.sbatch",
        returns=True,
        mistake=("sbatch", *ONE_CPU, "--job-name={run}", "--export=ALL,WORLD_SIZE=4", "{examples}/srun.sbatch"),
        refusal="srun says SLURM_STEP_NUM_TASKS=2, but env says WORLD_SIZE=4: make them agree",
    ),
    Launcher(
        "srun in salloc",
        (("bash", "{examples}/salloc.sh", "--name={run}"),),
        ("scancel --signal=USR2",),
        shown="bash examples/salloc.sh",
        mistake=("salloc", "--ntasks=4", *TRAIN),
        refusal="this is a single process, but Slurm says SLURM_NTASKS=4: start it with srun, torchrun or mpirun, or "
        "unset SLURM_NTASKS",
    ),
    Launcher(
        "mpirun",
        (("mpirun", "-np", "2", *TRAIN),),
        ("USR2",),
        shown="mpirun -np 2 python -m laststep",
        mistake=("env", "WORLD_SIZE=4", "mpirun", "-np", "2", *TRAIN),
        refusal="mpirun says OMPI_COMM_WORLD_SIZE=2, but env says WORLD_SIZE=4: make them agree",
    ),
    Launcher(
        "mpirun in sbatch",
        (("sbatch", *ONE_CPU, "--job-name={run}", "{examples}/mpirun.sbatch"),),
        ("scancel --batch --signal=USR2", "scontrol requeue"),
        shown="sbatch examples/mpirun.sbatch",
        returns=True,
        # As in a job on one node, mpirun starts the ranks itself; those of its daemons do not see Slurm's number.
        mistake=(
            *("sbatch", "--ntasks=4", "--output={run}.out"),
            *("--wrap", " ".join(("mpirun --mca ras ^slurm -np 2", *TRAIN))),
        ),
        refusal="mpirun says OMPI_COMM_WORLD_SIZE=2, but Slurm says SLURM_NTASKS=4: make them agree",
    ),
    Launcher(
        "torch's own variables",
        ((*RANK, "RANK=0", *TRAIN), (*RANK, "RANK=1", *TRAIN)),
        ("TERM",),
        shown="RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m laststep, and RANK=1",
        mistake=("salloc", "--ntasks=4", "env", "RANK=0", "WORLD_SIZE=2", *TRAIN),
        refusal="env says WORLD_SIZE=2, but Slurm says SLURM_NTASKS=4: make them agree",
    ),
    Launcher(
        "submitit, Slurm",
        (("python", "{project}/launch.py", "--nodes=2", "--name={run}"),),
        ("scontrol requeue",),
        shown="python launch.py --nodes 2",
        returns=True,
        refusal="its ranks always match the job that it submits",
    ),
    Launcher(
        "submitit, local",
        (("python", "-c", PROGRAM.format(executor="LocalExecutor", parameters="tasks_per_node=2")),),
        ("ranks USR2",),
        shown="submitit.LocalExecutor",
        results=True,
        returns=True,
        plain=True,
        refusal="starts its own ranks, whatever launcher it runs in",
    ),
    Launcher(
        "submitit, debug",
        (("python", "-c", PROGRAM.format(executor="DebugExecutor", parameters="")),),
        ("INT",),
        shown="submitit.DebugExecutor",
        results=True,
        size=1,
        refusal="is always a single process",
    ),
    Launcher(
        "a notebook",
        (("sh", "-c", "exec jupyter-execute --inplace {run}.ipynb"),),
        ("scontrol requeue",),
        shown="submit(config).result() in a cell",
        results=True,
        returns=True,
        refusal="its ranks always match the job that it submits",
    ),
)

LOCAL = Launcher(
    "--local",
    (("python", "{project}/launch.py", "--local", "--tasks-per-node=2", "--name={run}"),),
    (),
    shown="python launch.py --local",
)
# One for each way in which two ranks learn of each other.
NAMES = {"--spawn", "torchrun", "srun in sbatch", "mpirun", "torch's own variables", "submitit, local"}
BY_DETECTION = (LOCAL, *(launcher for launcher in LAUNCHERS if launcher.name in NAMES))


def undisturbed(size: int, epochs: int) -> dict[str, Any]:
    """The fingerprint of an undisturbed run of `size` ranks."""
    return undisturbed_run(Config.load("mnist", (*SMALL, f"train.epochs={epochs}", f"launch.tasks_per_node={size}")))

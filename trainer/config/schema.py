"""The schema of a run's configuration: each key with its type, default, limits and meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# sbatch options that Laststep writes itself, and the key to use in place of launch.slurm.OPTION.
OWN_OPTIONS = {
    "nodes": "launch.nodes",
    "ntasks": "launch.tasks_per_node",
    "ntasks-per-node": "launch.tasks_per_node",
    "gpus-per-node": "launch.gpus_per_node",
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
    "output": "launch.root, whose RUN/logs/ has them",
    "error": "launch.root, whose RUN/logs/ has them",
    "open-mode": "launch.root, whose RUN/logs/ has them",
}


def setting(default: Any, help: str, *, choices: Sequence[str] = (), least: float | None = None) -> Any:
    """A field with its description and what it may hold; validation and the reference read both from here."""
    metadata = {"help": help, "choices": tuple(choices), "least": least}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Model:
    """The network to train."""

    name: str = setting("convnet", "convnet, or any classification model of torchvision")
    args: dict[str, Any] = setting({}, "keyword arguments of the model's constructor, e.g. model.args.dropout=0.1")


@dataclass
class Data:
    """The samples, and how they are loaded."""

    name: str = setting("mnist-5k", "mnist-5k (ships with Laststep), mnist, fashion-mnist, cifar10, imagefolder, fake")
    root: str = setting("data", "folder of the data set; mnist, fashion-mnist and cifar10 are downloaded into it")
    workers: int = setting(0, "loader processes per rank; 0 loads in the rank itself, as does data in memory", least=0)
    args: dict[str, Any] = setting(
        {}, "augment, image_size; imagefolder: cache, decode_on_device; fake: classes, samples"
    )


@dataclass
class Optim:
    """The optimiser and its learning rate."""

    name: str = setting("sgd", "optimiser", choices=("sgd", "adamw"))
    lr: float = setting(0.1, "peak learning rate", least=0)
    weight_decay: float = setting(0.0, "weight decay (coupled in sgd, decoupled in adamw)", least=0)
    momentum: float = setting(0.9, "momentum of sgd", least=0)
    schedule: str = setting("cosine", "learning rate after warm-up", choices=("cosine", "step", "constant"))
    warmup_steps: int = setting(0, "steps over which the learning rate rises linearly from 0 to lr", least=0)
    clip_norm: float | None = setting(None, "largest norm of the whole gradient; null does not clip", least=0)


@dataclass
class Train:
    """How long, how much at a time, in which arithmetic."""

    epochs: int = setting(10, "passes over the training set", least=1)
    max_steps: int | None = setting(None, "end after this many steps, whatever epochs says", least=1)
    batch_size: int = setting(64, "samples per step over all ranks together (the global batch)", least=1)
    accumulate: int = setting(1, "micro-batches per step; saves memory, keeps the global batch", least=1)
    precision: str = setting("fp32", "arithmetic of forward and backward", choices=("fp32", "bf16", "fp16"))
    compile: bool = setting(False, "torch.compile the model")
    channels_last: bool = setting(False, "lay images out as NHWC in memory; faster convolutions on a GPU")
    ema_decay: float = setting(0.0, "decay per step of the averaged model that is validated; 0 keeps none", least=0)
    activation_checkpointing: bool = setting(False, "recompute blocks in the backward pass: less memory, more time")
    deterministic: bool = setting(False, "GPU: only deterministic kernels; needed there for a bit-exact resume")
    nonfinite: str = setting(
        "fail",
        "when a loss or gradient is NaN or infinite: end the run, or skip the step",
        choices=("fail", "skip"),
    )
    log_every: int = setting(10, "steps between progress lines; metrics.jsonl has every step all the same", least=1)


@dataclass
class Checkpoint:
    """When to save, besides at a stop and at the end, and what to keep."""

    every_steps: int | None = setting(None, "save each time this many steps are done", least=1)
    every_minutes: float | int | str | None = setting(
        10.0,
        "save after this many minutes, at the next progress line; auto: as often as is best for what a save costs and "
        "how often the run fails",
        least=0,
    )
    every_epochs: int | None = setting(1, "save after the validation of each N-th epoch", least=1)
    asynchronous: bool = setting(True, "write beside the training; false waits until each checkpoint is on the disk")
    keep_last: int = setting(2, "newest checkpoints to keep", least=1)
    keep_best: int = setting(1, "checkpoints with the lowest validation loss to keep besides", least=0)


@dataclass
class Launch:
    """Where and how large the job is, and when it ends."""

    name: str | None = setting(None, "name of the run and of its folder; null makes one from config and time")
    root: str = setting("runs", "folder of all runs; on a cluster, on the shared file system")
    nodes: int | str = setting(
        1, "nodes of the job; of a range such as 1-4 what is free at each start, with --local the least", least=1
    )
    gpus_per_node: int = setting(0, "GPUs per node, each with a rank of its own; 0 trains on CPUs", least=0)
    tasks_per_node: int | None = setting(None, "ranks per node on CPU nodes; null is 1", least=1)
    cpus_per_task: int = setting(1, "CPU cores per rank, its loader processes included", least=1)
    mem_gb: float | None = setting(None, "memory per node in GB; null leaves it to the cluster", least=0)
    time_min: int = setting(60, "time limit of one attempt in minutes; a run may take many attempts", least=1)
    partition: str | None = setting(None, "Slurm partition; null is the cluster's default")
    account: str | None = setting(None, "Slurm account to charge")
    qos: str | None = setting(None, "Slurm quality of service")
    constraint: str | None = setting(None, "Slurm node features, e.g. a100")
    exclude: str | None = setting(None, "nodes to avoid, e.g. node[7,9]")
    signal_delay_s: int = setting(90, "seconds before the time limit at which the run saves and requeues", least=1)
    grace_s: int | None = setting(
        None, "seconds between SIGTERM and SIGKILL; null asks Slurm (its KillWait), else 30", least=1
    )
    max_timeouts: int = setting(100, "time limits that a job may meet before it is not requeued again", least=0)
    max_failures: int = setting(
        3, "crashes, hangs and losses without a step kept that a job may have before it is not requeued again", least=0
    )
    hang_timeout_s: int = setting(600, "seconds that a rank waits for its peers before the attempt ends", least=1)
    init_method: str | None = setting(
        None,
        "where the ranks meet: tcp://HOST:PORT, env:// (MASTER_ADDR and MASTER_PORT), or file://PATH on a shared disk; "
        "null takes env:// where those are set, else a file in the run's folder",
    )
    backend: str = setting(
        "auto",
        "what the ranks' collectives run over; auto is nccl on GPUs and gloo on CPUs. gloo does on both, slowly: for "
        "finding out whether nccl is what fails",
        choices=("auto", "nccl", "gloo"),
    )
    setup: list[str] = setting([], "shell lines that run first, once on every node, e.g. 'module load cuda'")
    python: str | None = setting(
        None, "what starts Python in each rank, e.g. 'apptainer exec --nv /images/torch.sif python'; null: this Python"
    )
    srun: list[str] = setting(
        [], "more arguments of the srun that starts the ranks, e.g. Pyxis's --container-image=..."
    )
    env: dict[str, str] = setting({}, "environment variables of the job, e.g. launch.env.NCCL_DEBUG=INFO")
    slurm: dict[str, Any] = setting({}, "any other sbatch option by its long name, e.g. launch.slurm.reservation=lab")

    @property
    def kill_wait_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL; 30, Slurm's default, where nobody has told."""
        return 30 if self.grace_s is None else self.grace_s

    @property
    def ranks_per_node(self) -> int:
        """One rank per GPU, else `tasks_per_node`."""
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def node_counts(self) -> range:
        """How many nodes the job may get."""
        least, _, most = str(self.nodes).partition("-")
        return range(int(least), int(most or least) + 1)

    @property
    def world_sizes(self) -> range:
        """How many ranks the job may have."""
        counts, each = self.node_counts, self.ranks_per_node
        return range(counts.start * each, counts.stop * each, each)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job, the fewest that it may have."""
        return self.world_sizes[0]


@dataclass
class Settings:
    """All keys. `Config` puts a run's together and checks them."""

    seed: int = setting(0, "seed of every random draw of the run", least=0)
    device: str = setting(
        "auto", "auto takes the GPU that the job was given, else the CPU", choices=("auto", "cpu", "cuda")
    )
    task: str = setting(
        "classification", "what to train: classification, or package.module.Name of your own Task or function"
    )
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    launch: Launch = field(default_factory=Launch)

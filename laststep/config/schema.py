"""The schema of a run's configuration: the type, default, limits and help text of every key. `Settings` has all of
them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from laststep import rooms
from laststep.config.errors import ConfigError
from laststep.config.setting import setting

# The tasks that need no code of the user's, and the classes that they are.
READY_MADE = {
    "classification": "laststep.tasks.classification.Classification",
    "language": "laststep.tasks.language.Language",
}
SCRIPT = "script"  # the task of a run with `script`
COMMAND = "command"  # the same, where `script` does not know Laststep, and resumes by itself


@dataclass
class Model:
    """The network to train."""

    name: str = setting(
        "convnet",
        "convnet, or any torchvision classifier; task=language: a size, such as tiny-1m or llama-8b",
    )
    args: dict[str, Any] = setting({}, "keyword arguments for the model's constructor, e.g. model.args.dropout=0.1")
    weights: str | None = setting(
        None,
        "start from these weights: a .safetensors or .pt file, a run, or a name of torchvision's, e.g. DEFAULT; "
        "null: random ones",
    )


@dataclass
class Data:
    """The data set, and how it is loaded."""

    name: str = setting(
        "mnist-5k",
        "mnist-5k (ships with Laststep), mnist, fashion-mnist, cifar10, imagefolder or fake; task=language: "
        "classics (ships with Laststep) or tokens",
    )
    root: str = setting(
        "data",
        "folder of the data set, into which mnist, fashion-mnist and cifar10 are downloaded; tokens: what "
        "`prepare` has made",
    )
    workers: int = setting(0, "loader processes per rank; 0: the rank loads. Data held in memory uses none", least=0)
    args: dict[str, Any] = setting(
        {},
        "options of the data set: augment, image_size; imagefolder: cache, decode_on_device; fake: classes, samples; "
        "classics, tokens: window, mask_documents; tokens: sources",
    )


@dataclass
class Optim:
    """The optimiser and its learning rate."""

    name: str = setting("sgd", "sgd, adamw, or another class of torch.optim, but LBFGS and SparseAdam")
    lr: float = setting(0.1, "peak learning rate", least=0)
    weight_decay: float = setting(0.0, "weight decay (coupled for sgd, decoupled for adamw)", least=0)
    decay_norms_and_biases: bool = setting(
        True,
        "false: no weight decay for parameters of one dimension, nor for the embedding of task=language",
    )
    momentum: float = setting(0.9, "for sgd only; for others optim.args.momentum", least=0)
    args: dict[str, Any] = setting(
        {}, "more arguments for the optimiser's constructor, e.g. optim.args.betas=[0.9,0.95]"
    )
    schedule: str = setting(
        "cosine",
        "learning rate after the warm-up. cosine: falls to 0; step: divided by 10 after each third; constant: "
        "stays; wsd: stays, then falls linearly to 0",
        choices=("cosine", "step", "constant", "wsd"),
    )
    decay_share: float = setting(0.2, "wsd: the last share of the steps, in which the learning rate falls", least=0)
    warmup_steps: int = setting(0, "steps in which the learning rate rises linearly from 0", least=0)
    clip_norm: float | None = setting(
        None,
        "clip the gradient to this norm, and log its norm before as grad_norm; .inf: only log it; null: neither",
        least=0,
    )


@dataclass
class Train:
    """How long to train, the batch size, and the arithmetic."""

    epochs: int = setting(10, "passes over the training set", least=1)
    max_steps: int | None = setting(None, "end after this many steps at the latest; null: no limit", least=1)
    epoch_samples: int | None = setting(
        None,
        "samples per epoch; the next epoch continues where this one ended. null: a whole pass",
        least=1,
    )
    overfit_batches: int | None = setting(
        None,
        "train on this many batches only, to see whether the model can memorise them; null: on all",
        least=1,
    )
    batch_size: int = setting(
        64,
        "samples per step over all ranks (the global batch)",
        least=1,
    )
    accumulate: int = setting(1, "micro-batches per step and rank: less memory, the same global batch", least=1)
    shares: int | None = setting(
        None,
        "compute the global batch as this many shares: the same bits on any number of ranks that is shares / "
        "2^k, also if it changes. null: one per rank",
        least=1,
    )
    sharding: str = setting(
        "none",
        "of weights, gradients and the optimiser's state. none: whole on every rank. full: one shard per rank "
        "(FSDP2). hybrid: sharded within each node",
        choices=("none", "full", "hybrid"),
    )
    skip_steps: list[int] = setting([], "steps of a Task to leave out, e.g. [1234]", least=1)
    skip_samples: list[int] = setting(
        [], "samples of a Task to leave out, by their numbers, which `samples` shows", least=0
    )
    precision: str = setting(
        "fp32",
        "arithmetic of both passes. tf32 (GPUs only): fp32 with inputs of 10 bits of mantissa, several times as "
        "fast. bf16, fp16: autocast",
        choices=("fp32", "tf32", "bf16", "fp16"),
    )
    sanity: bool = setting(True, "run one validation batch before each attempt's first step")
    find_unused_parameters: bool = setting(
        False,
        "with several ranks: allow steps in which parameters get no gradient. One that no rank has used keeps "
        "its value; a GPU waits once in such a step",
    )
    compile: bool = setting(False, "compile the model with torch.compile")
    cuda_graphs: bool = setting(
        False,
        "run the compiled model as CUDA graphs, which is faster for small models; a Task clones what it keeps of "
        "the model's output beyond a step",
    )
    channels_last: bool = setting(False, "store images as NHWC; convolutions are faster on a GPU")
    ema_decay: float = setting(
        0.0,
        "decay per step of an exponential moving average of the weights, which is validated; 0: none",
        least=0,
    )
    activation_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    deterministic: bool = setting(
        True,
        "on GPUs: deterministic kernels only, and NCCL's ring and simple protocol unless NCCL_ALGO and "
        "NCCL_PROTO are set. false: faster, but a resumed run's last bits may differ",
    )
    nonfinite: str = setting(
        "fail",
        "when a loss or gradient is NaN or infinite: end the run, or skip the step",
        choices=("fail", "skip"),
    )
    rehearsal: bool = setting(
        True,
        "custom loops on three or more ranks: do each attempt's first batch twice and undo the first pass, so "
        "that DistributedDataParallel always adds in one order. false: a resumed run's last bits may differ",
    )
    log_every: int = setting(10, "steps between progress lines; metrics.jsonl has every step", least=1)
    digest_every: int | None = setting(
        100,
        "steps between digests of the state in metrics.jsonl, for `replay` and `diff`; null: none",
        least=1,
    )


@dataclass
class Checkpoint:
    """When to save, in addition to every stop and the end of the run, and which checkpoints to keep."""

    every_steps: int | None = setting(None, "save every N steps; null: not by steps", least=1)
    every_minutes: float | int | str | None = setting(
        10.0,
        "save every N minutes, at the next progress line; auto: by what a save costs and how often the run "
        "fails; null: not by time",
        least=0,
    )
    every_epochs: int | None = setting(1, "save after the validation of every N-th epoch; null: not by epochs", least=1)
    asynchronous: bool = setting(True, "write while training continues; false: wait for the disk")
    keep_last: int = setting(2, "newest checkpoints to keep", least=1)
    keep_best: int = setting(1, "best checkpoints to keep as well, by checkpoint.best_by", least=0)
    best_by: str = setting(
        "val_loss",
        "the validation metric that ranks checkpoints, e.g. val_accuracy:max; with loss in its name, the lowest "
        "is best",
    )
    anchors: str | int | None = setting(
        None,
        "checkpoints to keep for good, for `replay`: one every N steps, or as many as fit a size such as 200GB; "
        "null: none",
        least=1,
    )
    replicas: int = setting(
        0,
        "0 or 1 copies of each shard in another node's memory, for sharded models but hybrid: without one, a "
        "rank that dies costs the steps since the last save",
        least=0,
    )
    replica_every_steps: int = setting(
        1,
        "renew these copies every N steps. 1: each step waits for them, and none is lost. More: a rank that dies "
        "costs up to 2N - 1",
        least=1,
    )
    start_from: str | None = setting(
        None,
        "begin with another tool's weights and optimiser: a file of torch.save, Lightning's .ckpt, or a folder "
        "of torch.distributed.checkpoint or transformers",
    )


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
# Options that list GPUs as `gpu:TYPE:COUNT`, and options that list them as `TYPE:COUNT`.
GRES_OPTIONS = ("gres", "tres-per-node", "tres-per-task")
GPU_OPTIONS = ("gpus-per-node", "gpus", "gpus-per-task", "gpus-per-socket")


@dataclass
class Launch:
    """The size of the job, where it runs, when it ends, and when it is requeued."""

    name: str | None = setting(
        None, "name of the run and of its folder; null: from the configuration's name and the time"
    )
    root: str = setting("runs", "folder of all runs, on a disk that all nodes share")
    nodes: int | str = setting(
        1,
        "number of nodes, or a range such as 1-4: each start takes as many as are free (--local: the fewest)",
        least=1,
    )
    spare_nodes: int = setting(
        0,
        "more nodes: after a fault one replaces a dead or blamed node, without a requeue",
        least=0,
    )
    gpus_per_node: int = setting(
        0, "GPUs per node, one rank each; 0: as many as launch.slurm asks for, else train on CPUs", least=0
    )
    tasks_per_node: int | None = setting(None, "ranks per node on CPUs; null: 1", least=1)
    cpus_per_task: int = setting(1, "CPU cores per rank, including those of its loader processes", least=1)
    mem_gb: float | None = setting(None, "memory per node, in GB; null: the cluster's default", least=0)
    time_min: int = setting(
        60,
        "time limit of one attempt: minutes, or H:M:S, D-H or D-H:M:S as for sbatch",
        least=1,
    )
    least_time_min: int | None = setting(
        None,
        "shortest time limit that Slurm may give an attempt to start it sooner; null: launch.time_min",
        least=1,
    )
    partition: str | None = setting(
        None, "Slurm partition, or several: [a100,h100] takes the first that has room; null: the cluster's default"
    )
    account: str | None = setting(None, "Slurm account to charge")
    qos: str | None = setting(None, "Slurm quality of service")
    constraint: str | None = setting(None, "node features that Slurm must provide, e.g. a100")
    exclude: str | None = setting(None, "nodes that Slurm must not use, e.g. node[7,9]")
    signal_delay_s: int = setting(90, "seconds before the time limit at which the run saves and is requeued", least=1)
    grace_s: int | None = setting(
        None,
        "seconds between SIGTERM and SIGKILL (never under --local); null: Slurm's KillWait, or 30 without an answer",
        least=1,
    )
    chain: int = setting(
        1,
        "jobs in the queue, each after the one before: where sites forbid requeues, or cap a job's time",
        least=1,
    )
    max_timeouts: int = setting(100, "attempts of a job or chain that may end at the time limit", least=0)
    max_restarts: int = setting(
        3,
        "restarts in one allocation without a new step kept, after which the job is requeued",
        least=0,
    )
    max_failures: int = setting(
        3,
        "allocations of a job or chain without a new step kept, after which the run ends",
        least=0,
    )
    exclude_after: int | None = setting(
        2,
        "faults within a day for which one node is blamed (a rank killed or stuck, a GPU failed), after which "
        "the run leaves it; null: never",
        least=1,
    )
    hang_timeout_s: int = setting(600, "seconds that a rank waits for its peers before it ends the attempt", least=1)
    init_method: str | None = setting(
        None,
        "where the ranks meet: tcp://HOST:PORT, env:// (MASTER_ADDR and MASTER_PORT), or file://PATH on a shared "
        "disk; null: env:// where those are set, else a file of the run",
    )
    backend: str = setting(
        "auto",
        "for collectives; auto: nccl on GPUs, gloo on CPUs",
        choices=("auto", "nccl", "gloo"),
    )
    preflight: bool = setting(
        True,
        "check each node's GPUs (their errors with nvidia-ml-py), memory, disks and clock at a start. A node "
        "that fails is blamed, and the attempt is retried",
    )
    setup: list[str] = setting(
        [], "shell lines that run once on every node before the ranks start, e.g. 'module load cuda'"
    )
    python: str | None = setting(
        None,
        "command that starts Python in each rank, e.g. 'apptainer exec --nv /images/torch.sif python'; null: the "
        "one that submits",
    )
    uv: str | None = setting(
        None,
        "true: the packages of the project's uv.lock; or options of `uv sync`, such as '--extra cu128'; null: "
        "the environment that submits",
    )
    container: str | None = setting(
        None,
        "image in which the ranks run: a .sif file or an unpacked folder (Apptainer, Singularity), or a .sqsh "
        "file (Pyxis); launch.python is the Python in it (null: python3)",
    )
    srun: list[str] = setting([], "more arguments for the srun that starts the ranks")
    env: dict[str, str] = setting({}, "environment variables of the job, e.g. launch.env.NCCL_DEBUG=INFO")
    slurm: dict[str, Any] = setting(
        {},
        "any other sbatch option, by its long name, e.g. launch.slurm.gres=gpu:a100:4; null: not this option",
    )

    @property
    def uv_options(self) -> list[str] | None:
        """The options of `uv sync`; None where `uv` is off."""
        if self.uv is None or self.uv.lower() in ("", "false", "null"):
            return None
        return [] if self.uv.lower() == "true" else shlex.split(self.uv)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: one per GPU, or `tasks_per_node` on CPUs."""
        return self.gpus or self.tasks_per_node or 1

    @property
    def gpus_in_slurm(self) -> dict[str, int]:
        """The GPUs per node that `slurm` asks for, by the option as it is written."""
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


@dataclass
class Settings:
    """All keys of a configuration. `Config` loads and checks them."""

    seed: int = setting(0, "seed of all random numbers of the run", least=0)
    device: str = setting(
        "auto", "where to train; auto: the GPU if the job was given one, else the CPU", choices=("auto", "cpu", "cuda")
    )
    task: str = setting(
        "classification",
        "what to train: classification, language, or package.module.Name of your own Task class or function",
    )
    script: list[str] = setting(
        [],
        "a script to train instead, or any command, and its words: [train.py, --lr, 3e-4], [-m, package.module]",
    )
    args: dict[str, Any] = setting(
        {},
        "your own settings for your task, e.g. args.width=64; task=language: z_loss",
    )
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    launch: Launch = field(default_factory=Launch)  # rooms put their sections before it


if not TYPE_CHECKING:
    Settings = rooms.with_sections(Settings)


def gpus_in(slurm: Mapping[str, Any], nodes: int | str, tasks_per_node: int) -> dict[str, int]:
    """The GPUs per node that each option asks for, by the option as it is written in a configuration; options without
    a word about GPUs are left out. Raises ConfigError where the number of GPUs per node is not certain."""
    options = {str(key).replace("_", "-"): value for key, value in slurm.items() if value is not None}
    asked = {}
    for key, value in slurm.items():
        option, given = str(key).replace("_", "-"), f"launch.slurm.{key}={value}"
        count = None if value is None else _count(option, given, str(value))
        if count is None:
            continue
        if option.endswith("-per-task"):
            if count > 1:
                raise ConfigError(f"{given}: each rank uses one GPU; ask for 1 per task")
            count *= tasks_per_node
        elif option == "gpus" and str(nodes) != "1":
            raise ConfigError(f"{given}: Slurm may spread them unevenly over the nodes; use launch.slurm.gpus-per-node")
        elif option == "gpus-per-socket":
            sockets = str(options.get("sockets-per-node", ""))
            if not sockets.isdecimal():
                raise ConfigError(f"{given}: how many a node gives is not certain; use launch.slurm.gpus-per-node")
            count *= int(sockets)
        asked[given] = count
    return asked


def without_gpus(slurm: Mapping[str, Any]) -> dict[str, Any]:
    """The options that do not ask for GPUs."""
    return {key: value for key, value in slurm.items() if not gpus_in({key: value, "sockets-per-node": 1}, 1, 1)}


def _count(option: str, given: str, text: str) -> int | None:
    """The GPUs that an option asks for; None if it is not about GPUs. Raises ConfigError if it cannot be read."""
    if option in GRES_OPTIONS:
        items = [re.sub("^gres[/:]", "", item.strip()) for item in text.split(",")]
        items = [item for item in items if re.match(r"gpu\b", item)]
    elif option in GPU_OPTIONS:
        items = [f"gpu:{item.strip()}" for item in text.split(",")]
    else:
        return None
    total = 0
    for item in items:
        parts = re.split("[:=]", item.partition("(")[0])[1:]
        total += int(parts.pop()) if parts and parts[-1].isdecimal() else 1
        if len(parts) > 1 or "" in parts:
            raise ConfigError(f"{given}: cannot be read; write gpu:TYPE:COUNT in gres, TYPE:COUNT in other options")
    return total if items else None

"""The schema of a run's configuration: the type, default, limits and help text of every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from laststep.config.launch import Launch
from laststep.config.setting import setting

# The tasks that need no code of the user's, and the classes that they are.
READY_MADE = {
    "classification": "laststep.tasks.classification.Classification",
    "language": "laststep.tasks.language.Language",
}


@dataclass
class Model:
    """The network to train."""

    name: str = setting(
        "convnet",
        "convnet, or the name of any torchvision classification model; task=language: a size, such as tiny-1m, "
        "gpt2-124m or llama-8b",
    )
    args: dict[str, Any] = setting({}, "keyword arguments for the model's constructor, e.g. model.args.dropout=0.1")
    weights: str | None = setting(
        None,
        "start from these weights: a .safetensors or .pt file, a run (its newest checkpoint; the averaged weights if "
        "there are any), or torchvision's name for them, e.g. DEFAULT. The last layer stays as initialised if the "
        "number of classes differs. null: start from random weights",
    )


@dataclass
class Data:
    """The data set, and how it is loaded."""

    name: str = setting(
        "mnist-5k",
        "data set: mnist-5k (ships with Laststep), mnist, fashion-mnist, cifar10, imagefolder or fake; "
        "task=language: classics (ships with Laststep) or tokens",
    )
    root: str = setting(
        "data",
        "folder of the data set; mnist, fashion-mnist and cifar10 are downloaded into it if missing; "
        "tokens: what `prepare` has made",
    )
    workers: int = setting(
        0, "loader processes per rank; 0 loads in the rank itself. Data sets held in memory use none", least=0
    )
    args: dict[str, Any] = setting(
        {},
        "options of the data set: augment, image_size; imagefolder: cache, decode_on_device; fake: classes, samples; "
        "classics, tokens: window, mask_documents; tokens: sources",
    )


@dataclass
class Optim:
    """The optimiser and its learning rate."""

    name: str = setting(
        "sgd", "optimiser: sgd, adamw, or any other class of torch.optim, such as Adam, NAdam or RMSprop, in any case"
    )
    lr: float = setting(0.1, "peak learning rate", least=0)
    weight_decay: float = setting(0.0, "weight decay (coupled for sgd, decoupled for adamw)", least=0)
    decay_norms_and_biases: bool = setting(
        True,
        "false: no weight decay for parameters of one dimension, which are biases and the parameters of normalisation "
        "layers, nor for the embedding of task=language",
    )
    momentum: float = setting(0.9, "momentum, for sgd only; for others optim.args.momentum", least=0)
    args: dict[str, Any] = setting(
        {}, "more keyword arguments for the optimiser's constructor, e.g. optim.args.betas=[0.9,0.95]"
    )
    schedule: str = setting(
        "cosine",
        "learning rate after the warm-up; cosine: falls to 0, step: divided by 10 after each third, constant: lr, wsd: "
        "lr, and falls linearly to 0 at the end, see optim.decay_share",
        choices=("cosine", "step", "constant", "wsd"),
    )
    decay_share: float = setting(
        0.2, "optim.schedule=wsd: the last share of the steps, in which the learning rate falls", least=0
    )
    warmup_steps: int = setting(0, "steps of warm-up, in which the learning rate rises linearly from 0 to lr", least=0)
    clip_norm: float | None = setting(
        None,
        "clip the gradient to this norm (over all parameters), and log its norm before as grad_norm; .inf: log it, and "
        "do not clip; null: neither",
        least=0,
    )


@dataclass
class Train:
    """How long to train, the batch size, and the arithmetic."""

    epochs: int = setting(10, "passes over the training set (epochs)", least=1)
    max_steps: int | None = setting(
        None, "end after this many steps, even if fewer than train.epochs epochs are done; null: no limit", least=1
    )
    epoch_samples: int | None = setting(
        None,
        "samples per epoch: the next epoch continues where this one ended within the pass over the training set. A "
        "validation follows each epoch. null: an epoch is a pass",
        least=1,
    )
    batch_size: int = setting(
        64,
        "samples per step over all ranks together (the global batch); it does not change with the number of ranks",
        least=1,
    )
    accumulate: int = setting(1, "micro-batches per step and rank: less memory, the same global batch", least=1)
    shares: int | None = setting(
        None,
        "always compute the global batch as this many shares, divided among the ranks: a run then ends with the same "
        "bits on any number of ranks that is shares / 2^k, also if that number changes; a custom loop computes them in "
        "a loop over run.shares(batch). null: one per rank",
        least=1,
    )
    sharding: str = setting(
        "none",
        "where the weights, their gradients and the state of the optimiser are. none: on every rank "
        "(DistributedDataParallel). full: cut into as many shards as there are ranks (FSDP2), for models that do not "
        "fit one GPU. hybrid: cut within each node, and each node has a copy",
        choices=("none", "full", "hybrid"),
    )
    precision: str = setting(
        "fp32",
        "arithmetic of the forward and backward passes. tf32 (GPUs only): fp32, but products and convolutions round "
        "their inputs to 10 bits of mantissa, which is several times as fast; fp32 never does. bf16, fp16: autocast",
        choices=("fp32", "tf32", "bf16", "fp16"),
    )
    compile: bool = setting(False, "compile the model with torch.compile")
    cuda_graphs: bool = setting(
        False,
        "launch the kernels of the compiled model as CUDA graphs (torch.compile's mode reduce-overhead): for models so "
        "small that launching them takes longer than running them; a Task that keeps what the model returns beyond a "
        "step must clone it",
    )
    channels_last: bool = setting(False, "store images as NHWC in memory; convolutions are faster on a GPU")
    ema_decay: float = setting(
        0.0,
        "keep an exponential moving average of the weights, with this decay per step, and validate it; 0: none",
        least=0,
    )
    activation_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    deterministic: bool = setting(
        True,
        "use only deterministic kernels on GPUs, and NCCL's ring algorithm and simple protocol unless NCCL_ALGO and "
        "NCCL_PROTO are set: a bit-exact resume on GPUs needs this. false: faster, but a resumed run's last bits may "
        "differ. Without effect on CPUs",
    )
    nonfinite: str = setting(
        "fail",
        "what to do when a loss or gradient is NaN or infinite: end the run, or skip the step",
        choices=("fail", "skip"),
    )
    rehearsal: bool = setting(
        True,
        "custom loops on three or more ranks: process each attempt's first batch twice and undo the first pass, so "
        "that DistributedDataParallel adds gradients in the same order in every attempt. false: the last bits of a "
        "resumed run may differ",
    )
    log_every: int = setting(10, "steps between progress lines; metrics.jsonl always has every step", least=1)


@dataclass
class Checkpoint:
    """When to save, in addition to every stop and the end of the run, and which checkpoints to keep."""

    every_steps: int | None = setting(None, "save every N steps; null: not by steps", least=1)
    every_minutes: float | int | str | None = setting(
        10.0,
        "save every N minutes, at the next progress line; auto: choose the interval from the measured cost of a save "
        "and how often the run fails; null: not by time",
        least=0,
    )
    every_epochs: int | None = setting(1, "save after the validation of every N-th epoch; null: not by epochs", least=1)
    asynchronous: bool = setting(
        True, "write checkpoints while training continues; false: wait until each one is on the disk"
    )
    keep_last: int = setting(2, "number of newest checkpoints to keep", least=1)
    keep_best: int = setting(1, "number of best checkpoints to keep as well, see checkpoint.best_by", least=0)
    best_by: str = setting(
        "val_loss",
        "the validation metric that ranks checkpoints, with :min or :max for which values are better, e.g. "
        "val_accuracy:max; of a name with loss in it, the lowest",
    )
    replicas: int = setting(
        0,
        "copies of each rank's shard in the host memory of another node, 0 or 1, with train.sharding=full or in a "
        "custom loop that shards its model: without one, a rank that dies costs the steps since the last save",
        least=0,
    )
    replica_every_steps: int = setting(
        1,
        "renew these copies every N steps. 1: a step ends when its copies are complete, so none is lost. More: the "
        "copies travel beside the next steps, and a rank that dies costs up to N",
        least=1,
    )


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
    args: dict[str, Any] = setting(
        {},
        "settings of your own for your task, e.g. args.width=64: a custom loop reads run.args.width; task=language: "
        "z_loss, the weight of the squared log of the softmax's sum, e.g. 1e-4",
    )
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    launch: Launch = field(default_factory=Launch)

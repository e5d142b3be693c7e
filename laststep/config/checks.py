"""Checks of a configuration's values: numbers out of range, keys that contradict each other. They ask no machine."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from laststep.config.errors import ConfigError, nearest
from laststep.config.keep import Anchors, Ranking
from laststep.config.keys import FLOAT_OR_AUTO, INT_OR_RANGE, fields_of, shown
from laststep.config.machine import Machine, Way
from laststep.config.schema import READY_MADE, RESERVED_SBATCH_OPTIONS, Launch, Settings, Train
from laststep.say import counted

# The largest batch size to propose. For a wide range of nodes, the smallest one that divides is absurdly large.
LARGEST_BATCH = 10**9
# Optimisers whose update of a row depends on other rows, which other ranks hold.
NOT_BY_ROWS = ("adafactor", "muon")
NOT_BY_ROWS_WHY = "updates a matrix as a whole"


def validate(config: Settings) -> None:
    """Raise ConfigError for values that cannot work anywhere; each room's `check` looks at the rest."""
    check_values(config)
    if config.task in READY_MADE:  # a task of the user's own may be a custom loop, which has a batch of its own
        train = config.train
        check_batch(train.batch_size, config.launch.world_sizes, train.accumulate, train.shares)


def check_values(config: Settings) -> None:
    """`validate`, without checking that the global batch divides among the ranks."""
    for key, field, value in fields_of(config):
        _check_limits(key, field, value)
    _check_single_keys(config)
    _check_launch(config)
    _check_shares(config)
    _check_sharding(config)
    _check_cuda_graphs(config)


def check_batch(batch_size: int, world_sizes: Iterable[int], accumulate: int, shares: int | None = None) -> None:
    """Raise ConfigError unless the global batch divides into equal micro-batches for each of these numbers of ranks, or
    for the shares."""
    if shares is not None:
        if batch_size % (divisor := shares * accumulate):
            raise ConfigError(
                f"train.batch_size={batch_size}: not divisible by train.shares={shares} x "
                f"train.accumulate={accumulate}; {max(divisor, round(batch_size / divisor) * divisor)} would be"
            )
        return
    wrong, divisor = [], 1
    for size in world_sizes:
        divisor = math.lcm(divisor, size * accumulate)
        if batch_size % (size * accumulate):
            wrong.append(str(size))
        if divisor > LARGEST_BATCH:
            break
    if wrong:
        near = max(divisor, round(batch_size / divisor) * divisor)
        raise ConfigError(
            f"train.batch_size={batch_size}: not divisible by {counted(', '.join(wrong), 'rank')} x "
            f"train.accumulate={accumulate}; {'use fewer nodes' if divisor > LARGEST_BATCH else f'{near} would be'}"
        )


def sizes_for(shares: int) -> list[int]:
    """The numbers of ranks that can divide this many shares among them (train.shares), ascending: shares / 2^k."""
    return [*sizes_for(shares // 2), shares] if shares % 2 == 0 else [shares]


def nodes_for(shares: int | None, launch: Launch) -> list[int]:
    """The numbers of nodes that can train, ascending: of a range, those whose ranks can divide the shares among them,
    which may be fewer than the range has."""
    counts, each = launch.node_counts, launch.ranks_per_node
    if shares is None or len(counts) == 1:
        return list(counts)
    return [size // each for size in sizes_for(shares) if size % each == 0 and size // each <= counts[-1]]


def check(config: Settings, machine: Machine) -> None:
    """Raise ConfigError for a state that the ranks of a job cannot hold between them; a rank asks its world."""
    if machine.way is not Way.RANK:
        launch = config.launch
        check_shards(config.train, launch.node_counts[0], launch.ranks_per_node)
        check_replicas(config.checkpoint.replicas, launch.node_counts[0])


def check_replicas(replicas: int, nodes: int) -> None:
    """Raise ConfigError unless these nodes can keep this many copies of each other's shards (checkpoint.replicas)."""
    if replicas and nodes == 1:
        raise ConfigError(
            f"checkpoint.replicas={replicas}: keeps copies on another node, and this run has one node; use more nodes, "
            "or checkpoint.replicas=0"
        )


def check_shards(train: Train, nodes: int, ranks_per_node: int, hosts: Sequence[str] = ()) -> None:
    """Raise ConfigError unless these ranks, on these `hosts`, can hold a state between them (train.sharding)."""
    sharding, given, none = train.sharding, f"train.sharding={train.sharding}", "train.sharding=none"
    if sharding == "none":
        return
    if nodes * ranks_per_node == 1:
        raise ConfigError(f"{given}: this run has one rank, which holds everything anyway; use more, or {none}")
    if sharding == "hybrid" and ranks_per_node == 1:
        raise ConfigError(f"{given}: cuts the state over the ranks of a node, and a node has one; use full, or {none}")
    if sharding == "hybrid" and nodes == 1:
        raise ConfigError(f"{given}: keeps a copy of the state on each node, and this run has one node; use full")
    if sharding == "hybrid" and train.shares is not None and ranks_per_node & (ranks_per_node - 1):
        raise ConfigError(
            f"{given}: with train.shares={train.shares} the ranks of a node must be 2, 4, 8 ..., not {ranks_per_node}; "
            "use full"
        )
    # Tests pretend that one host is several nodes.
    node_by_node = [hosts[rank - rank % ranks_per_node] for rank in range(len(hosts))]
    if sharding == "hybrid" and len(set(hosts)) > 1 and node_by_node != list(hosts):
        raise ConfigError(
            f"{given}: each node must have as many ranks as the others, numbered node by node; these are on "
            f"{', '.join(hosts)}"
        )


def check_no_sharding(config: Settings) -> None:
    """Raise ConfigError if a custom loop is configured with train.sharding."""
    if config.train.sharding != "none":
        raise ConfigError(
            f"train.sharding={config.train.sharding}: {config.task} is a custom loop, and this key is for Tasks; "
            "remove it, and call fully_shard in the loop"
        )


def check_copies_of_task(config: Settings) -> None:
    """Raise ConfigError if a Task is configured with copies of shards, and without shards that need them."""
    replicas, sharding = config.checkpoint.replicas, config.train.sharding
    if replicas and sharding != "full":
        raise ConfigError(
            f"checkpoint.replicas={replicas}: copies need train.sharding=full, not train.sharding={sharding}; remove "
            "this key"
        )


def check_size(shares: int | None, ranks: int) -> None:
    """Raise ConfigError unless this many ranks can divide the shares among them."""
    if shares is not None and ranks not in (fit := sizes_for(shares)):
        raise ConfigError(
            f"train.shares={shares}: cannot be divided among {counted(ranks, 'rank')}; these numbers of ranks fit: "
            f"{', '.join(map(str, fit))}"
        )


def _check_shares(config: Settings) -> None:
    """Raise ConfigError unless the job's ranks can divide the shares. Of a range of nodes, each start uses the largest
    number that fits."""
    launch, shares = config.launch, config.train.shares
    if shares is None:
        return
    is_range, fewest = len(launch.node_counts) > 1, launch.node_counts[0]
    if not is_range or all(nodes > fewest for nodes in nodes_for(shares, launch)):
        check_size(shares, launch.world_size)


def _check_sharding(config: Settings) -> None:
    """Raise ConfigError for keys that contradict train.sharding."""
    train, given = config.train, f"train.sharding={config.train.sharding}"
    replicas = config.checkpoint.replicas
    if replicas > 1:
        raise ConfigError(f"checkpoint.replicas={replicas}: one copy of each shard is kept at most; use 1")
    if train.sharding == "none":
        return
    if train.shares is not None and train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate={train.accumulate}: with {given} and train.shares={train.shares} each share is one "
            "micro-batch; remove this key, or use more shares"
        )
    if train.find_unused_parameters:
        raise ConfigError(
            f"train.find_unused_parameters=true: cannot be combined with {given}, where a part of the model that no "
            "rank uses needs no key, and one that only some ranks use cannot be trained; remove one of the two"
        )
    if train.channels_last:
        raise ConfigError(f"train.channels_last=true: cannot be combined with {given}; shards keep torch's own layout")
    if config.optim.name.lower() in NOT_BY_ROWS:
        raise ConfigError(f"optim.name={config.optim.name}: {NOT_BY_ROWS_WHY}, so {given} cannot shard it; use adamw")


def _check_cuda_graphs(config: Settings) -> None:
    """Raise ConfigError for keys that contradict train.cuda_graphs. A graph writes the gradients of each backward pass
    to the same memory, so a step can have one backward pass."""
    train, given = config.train, "train.cuda_graphs=true"
    if not train.cuda_graphs:
        return
    if config.device == "cpu":
        raise ConfigError(f"{given}: only GPUs have CUDA graphs, but device=cpu; remove this key")
    if not train.compile:
        raise ConfigError(f"{given}: records what torch.compile makes; set train.compile=true, too")
    if train.sharding != "none":
        raise ConfigError(
            f"{given}: needs weights that stay where they are, and train.sharding={train.sharding} gathers them anew "
            "in each step; remove one of the two"
        )
    if train.activation_checkpointing:
        raise ConfigError(
            f"{given}: no graph can record how recomputed activations draw their random numbers again; remove this "
            "key or train.activation_checkpointing=true"
        )
    for key, value in (("accumulate", train.accumulate), ("shares", train.shares)):
        if value not in (1, None):
            raise ConfigError(
                f"{given}: needs exactly one backward pass per step, and with train.{key}={value} a rank may have "
                "several; remove one of the two"
            )


def _check_limits(key: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Raise ConfigError for a value outside the limits that the schema gives for its key."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if field.type == "list[str]" and not all(isinstance(line, str) for line in value):
        raise ConfigError(f"{shown(key, value)}: must be of type list[str]")
    if choices and value not in choices:
        raise ConfigError(f"{key}={value}: {nearest(str(value), choices)}")
    if isinstance(value, float) and not math.isfinite(value) and not (key == "optim.clip_norm" and value == math.inf):
        raise ConfigError(f"{key}={value}: must be a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}={value}: must fit into 64 bits")
    for each in value if isinstance(value, list) else [value]:
        if least is not None and isinstance(each, (int, float)) and each < least:
            raise ConfigError(f"{key}={value}: must be at least {least:g}")


def _check_single_keys(config: Settings) -> None:
    """Raise ConfigError for limits of single keys that the schema cannot express."""
    if config.optim.lr == 0:
        raise ConfigError("optim.lr=0: the model would learn nothing; give a positive learning rate")
    if config.train.ema_decay >= 1:
        raise ConfigError(f"train.ema_decay={config.train.ema_decay}: must be below 1, e.g. 0.999")
    if not 0 < config.optim.decay_share <= 1:
        raise ConfigError(f"optim.decay_share={config.optim.decay_share}: must be above 0 and at most 1")
    if config.train.overfit_batches is not None and config.train.epoch_samples is not None:
        raise ConfigError(
            f"train.epoch_samples={config.train.epoch_samples}: with train.overfit_batches an epoch is a pass over the "
            "samples of those batches; leave one out"
        )
    for key in ("optim.clip_norm", "checkpoint.every_minutes", "launch.mem_gb"):
        section, name = key.split(".")
        if getattr(getattr(config, section), name) == 0:
            raise ConfigError(f"{key}=0: must be above 0; write {key}=null to turn it off")
    if config.train.precision == "tf32" and config.device == "cpu":
        raise ConfigError("train.precision=tf32: only GPUs have TF32, but device=cpu; use fp32 or bf16")
    Ranking.parse(config.checkpoint.best_by)
    minutes = config.checkpoint.every_minutes
    if isinstance(minutes, str) and minutes != "auto":
        raise ConfigError(f"checkpoint.every_minutes={minutes}: must be of type {FLOAT_OR_AUTO} or null, in minutes")
    Anchors.parse(config.checkpoint.anchors)


def _check_launch(config: Settings) -> None:
    """Raise ConfigError for a job that cannot start as configured."""
    launch = config.launch
    _check_nodes(launch)
    _check_gpus(config)
    if launch.signal_delay_s >= 60 * launch.time_min:
        raise ConfigError(
            f"launch.signal_delay_s={launch.signal_delay_s}: must be shorter than the time limit "
            f"(launch.time_min={launch.time_min}: {60 * launch.time_min} s)"
        )
    if (least := launch.least_time_min) is not None:
        if least > launch.time_min:
            raise ConfigError(f"launch.least_time_min={least}: must be at most launch.time_min={launch.time_min}")
        if launch.signal_delay_s >= 60 * least:
            raise ConfigError(
                f"launch.least_time_min={least}: must be longer than launch.signal_delay_s={launch.signal_delay_s} s"
            )
    _check_alike(launch)
    _check_environment(launch)
    for option in launch.slurm:
        if instead := RESERVED_SBATCH_OPTIONS.get(str(option).replace("_", "-")):
            raise ConfigError(f"launch.slurm.{option}: Laststep sets this itself; use {instead}")
    for name in launch.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"launch.env.{name}: no name of an environment variable; use letters, digits and '_', no digit first"
            )
    if launch.init_method is not None:
        # An IPv6 address is written in brackets.
        at = re.fullmatch(r"env://|file:///.+|tcp://(?:[^:/\[\]]+|\[.+\]):(\d+)", launch.init_method)
        if not at or (at[1] and not 0 < int(at[1]) < 65536):
            raise ConfigError(
                f"launch.init_method={launch.init_method}: must be env://, tcp://HOST:PORT or file:///PATH"
            )
    if launch.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", launch.name):
        raise ConfigError(
            f"launch.name={launch.name!r}: use up to 200 letters, digits, '.', '_' and '-', a letter or digit first"
        )


def _check_environment(launch: Launch) -> None:
    """Raise ConfigError for two answers to the question which Python the ranks run."""
    given = f"launch.uv={launch.uv}"
    try:
        options = launch.uv_options
    except ValueError as error:
        raise ConfigError(f"{given}: {error}") from None
    if options is None:
        return
    if options and not options[0].startswith("-"):
        raise ConfigError(f"{given}: must be true, or options of `uv sync` such as '--extra cu128'")
    if launch.container is not None:
        raise ConfigError(f"{given}: with launch.container the packages are those of the image; leave one out")
    if launch.python is not None:
        raise ConfigError(f"{given}: launch.python={launch.python} names another Python; leave one out")


def _check_gpus(config: Settings) -> None:
    """Raise ConfigError unless all keys agree on the GPUs of a node, one rank for each."""
    launch = config.launch
    asked = {**launch.gpus_in_slurm, **({launch.gpus_key: launch.gpus} if launch.gpus_per_node else {})}
    if len(set(asked.values())) > 1:
        first, second = min(asked, key=lambda key: asked[key]), max(asked, key=lambda key: asked[key])
        raise ConfigError(
            f"{first} {second}: ask for {asked[first]} and for {asked[second]} GPUs per node; leave one of them out"
        )
    if launch.gpus and launch.tasks_per_node not in (None, launch.gpus):
        raise ConfigError(
            f"launch.tasks_per_node={launch.tasks_per_node}: each GPU has exactly one rank ({launch.gpus_key}); remove "
            "this key"
        )
    if config.device == "cpu" and launch.gpus:
        raise ConfigError(f"{launch.gpus_key}: device=cpu uses no GPU; set launch.tasks_per_node instead")


def _check_alike(launch: Launch) -> None:
    """Raise ConfigError for options of a heterogeneous job: all nodes of a run are alike."""
    options = [(f"launch.slurm.{key}={value}", f"--{key}".replace("_", "-")) for key, value in launch.slurm.items()]
    for given, option in [*options, *((f"launch.srun={launch.srun}", word) for word in launch.srun)]:
        if option.partition("=")[0] in ("--hetjob", "--packjob", "--het-group", "--pack-group", ":"):
            raise ConfigError(f"{given}: a run cannot be a heterogeneous job, all its nodes are alike; remove it")


def _check_nodes(launch: Launch) -> None:
    """Raise ConfigError unless launch.nodes is a positive number or a range of them."""
    given = f"launch.nodes={launch.nodes}"
    if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", str(launch.nodes)):
        raise ConfigError(f"{given}: must be of type {INT_OR_RANGE}")
    if not launch.node_counts:
        raise ConfigError(f"{given}: the smaller number comes first")
    if launch.node_counts[0] < 1:
        raise ConfigError(f"{given}: must be at least 1")

"""The schema of a run's configuration, and how it is put together: schema <- YAML file <- key=value."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """The command or the configuration is wrong: one line that names the field, the value and the fix."""


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
    workers: int = setting(0, "loader processes per rank; 0 loads in the rank itself", least=0)
    args: dict[str, Any] = setting({}, "options of the data set: augment, image_size; for fake also classes, samples")


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
    log_every: int = setting(10, "steps between progress lines; metrics.jsonl has every step all the same", least=1)


@dataclass
class Checkpoint:
    """When to save, besides at a stop and at the end, and what to keep."""

    every_steps: int | None = setting(None, "save each time this many steps are done", least=1)
    every_minutes: float | None = setting(10.0, "save after this many minutes, at the next progress line", least=0)
    every_epochs: int | None = setting(1, "save after the validation of each N-th epoch", least=1)
    keep_last: int = setting(2, "newest checkpoints to keep", least=1)
    keep_best: int = setting(1, "checkpoints with the lowest validation loss to keep besides", least=0)


@dataclass
class Launch:
    """Where and how large the job is, and when it ends."""

    name: str | None = setting(None, "name of the run and of its folder; null makes one from config and time")
    root: str = setting("runs", "folder of all runs; on a cluster, on the shared file system")
    nodes: int = setting(1, "nodes of the job", least=1)
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
    max_timeouts: int = setting(100, "time limits that a run may meet before it is not requeued again", least=0)
    hang_timeout_s: int = setting(600, "seconds that a rank waits for its peers before the attempt ends", least=1)
    setup: list[str] = setting([], "shell lines that the job runs first, e.g. 'module load cuda'")
    env: dict[str, str] = setting({}, "environment variables of the job, e.g. launch.env.NCCL_DEBUG=INFO")
    slurm: dict[str, Any] = setting({}, "any other sbatch option by its long name, e.g. launch.slurm.reservation=lab")

    @property
    def ranks_per_node(self) -> int:
        """One rank per GPU, else `tasks_per_node`."""
        return self.gpus_per_node or self.tasks_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node


@dataclass
class Config:
    """The whole configuration of a run; `Config.load` makes one."""

    seed: int = setting(0, "seed of every random draw of the run", least=0)
    device: str = setting(
        "auto", "auto takes the GPU that the job was given, else the CPU", choices=("auto", "cpu", "cuda")
    )
    task: str = setting("classification", "what to train: classification, or package.module.ClassName of your own Task")
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    launch: Launch = field(default_factory=Launch)

    @classmethod
    def load(cls, source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """The schema, filled from a YAML file (a path, or a name in configs/), then from `key=value` words.

        Raises ConfigError, which names the field, the value and the fix.
        """
        tree = OmegaConf.structured(cls)
        if source is not None:
            path = find_config(source)
            for key, value in _leaves(_read_yaml(path)):
                _assign(tree, key, value)
        for word in overrides:
            for key, value in _leaves(_parse_override(word)):
                _assign(tree, key, value)
        try:
            config: Config = OmegaConf.to_object(tree)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {_first_line(error)}") from None
        validate(config)
        return config

    def to_yaml(self) -> str:
        """The resolved configuration as YAML; `Config.load` of it gives an equal Config."""
        return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(self))))

    def save(self, path: Path) -> None:
        """Write `to_yaml` to `path`, whole or not at all."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self.to_yaml())
        temporary.replace(path)


def fields_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Each leaf of a Config (or of its class) as (dotted key, field, value or default), in the schema's order."""
    value_of = schema() if isinstance(schema, type) else schema
    for f in dataclasses.fields(value_of):
        value = getattr(value_of, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint for a wrong name: the nearest valid one, else some or all of them."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose from {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def find_config(source: str | Path) -> Path:
    """The YAML file for a name in configs/ or a path."""
    path = Path(source)
    if path.is_file():
        return path
    named = CONFIGS / f"{source}.yaml"
    if named.is_file():
        return named
    names = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
    raise ConfigError(f"--config {source}: no such file, and no such name in configs/; {nearest(str(source), names)}")


def validate(config: Config) -> None:
    """Refuse a configuration that cannot work, as far as words alone can tell; `checks` asks the machine."""
    for key, f, value in fields_of(config):
        choices, least = f.metadata["choices"], f.metadata["least"]
        if f.type == "list[str]" and not all(isinstance(line, str) for line in value):
            raise ConfigError(f"{key}={value}: must be of type list[str]")
        if choices and value not in choices:
            raise ConfigError(f"{key}={value}: {nearest(str(value), choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
        if least is not None and value is not None and value < least:
            raise ConfigError(f"{key}={value}: must be at least {least:g}")
    if config.optim.lr == 0:
        raise ConfigError("optim.lr=0: nothing would be learned; give a positive learning rate")
    if config.train.ema_decay >= 1:
        raise ConfigError(f"train.ema_decay={config.train.ema_decay}: must be below 1, e.g. 0.999")
    for key in ("optim.clip_norm", "checkpoint.every_minutes", "launch.mem_gb"):
        section, name = key.split(".")
        if getattr(getattr(config, section), name) == 0:
            raise ConfigError(f"{key}=0: must be above 0; write {key}=null to turn it off")
    launch = config.launch
    if launch.gpus_per_node and launch.tasks_per_node not in (None, launch.gpus_per_node):
        raise ConfigError(
            f"launch.tasks_per_node={launch.tasks_per_node}: every GPU has one rank of its own, "
            f"so leave it out (launch.gpus_per_node={launch.gpus_per_node})"
        )
    if config.device == "cpu" and launch.gpus_per_node:
        raise ConfigError(
            f"launch.gpus_per_node={launch.gpus_per_node}: device=cpu uses none; use launch.tasks_per_node"
        )
    if launch.signal_delay_s >= 60 * launch.time_min:
        raise ConfigError(
            f"launch.signal_delay_s={launch.signal_delay_s}: must be shorter than the time limit "
            f"(launch.time_min={launch.time_min}, that is {60 * launch.time_min} s)"
        )
    if launch.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", launch.name):
        raise ConfigError(
            f"launch.name={launch.name!r}: use up to 200 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    check_batch(config.train.batch_size, launch.world_size, config.train.accumulate)


def check_batch(batch_size: int, world_size: int, accumulate: int) -> None:
    """Raise ConfigError unless the global batch divides into equal micro-batches for all ranks."""
    if batch_size % (world_size * accumulate):
        step = world_size * accumulate
        near = max(step, round(batch_size / step) * step)
        raise ConfigError(
            f"train.batch_size={batch_size}: not divisible by {world_size} ranks x train.accumulate={accumulate}; "
            f"{near} would be"
        )


def _read_yaml(path: Path) -> Any:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # a YAML error, an unreadable file: whatever it is, this file is not a configuration
        raise ConfigError(f"{path}: cannot be read as YAML: {_yaml_problem(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines")
    return content


def _parse_override(word: str) -> Any:
    key, equals, _ = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word}: not a verb, an option or key=value; see --help")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([word]))
    except Exception as error:  # whatever YAML or OmegaConf makes of it, the word is what is wrong
        raise ConfigError(f"{word}: cannot be read as key=value: {_first_line(error)}") from None


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested dictionaries; an empty dictionary is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _assign(tree: Any, key: str, value: Any) -> None:
    known = {k: f for k, f, _ in fields_of(Config)}
    given = f"{key}={'null' if value is None else value}"
    open_key = next((k for k, f in known.items() if f.type.startswith("dict") and key.startswith(k + ".")), None)
    if key not in known and open_key is None:
        sections = [k for k in known if k.startswith(key + ".")]
        if len(key) > 100:
            raise ConfigError(f"{key[:60]!r}...: no such key")  # a file that is no configuration at all
        if sections:
            raise ConfigError(f"{given}: {key} is a section; set one of {', '.join(sections)}")
        raise ConfigError(
            f"{key}: no such key; {nearest(key, list(known)) if '.' in key else _nearest_leaf(key, known)}"
        )
    if value == {} and key in known:
        return  # an empty dictionary in a file changes nothing
    try:
        OmegaConf.update(tree, key, value)
    except OmegaConfBaseException:
        kind = known[open_key or key].type.replace(" | None", " or null")
        raise ConfigError(f"{given}: must be of type {kind}") from None


def _nearest_leaf(name: str, known: dict[str, Any]) -> str:
    """For a key without its section (`lr=1`): the full key that ends in it, else the nearest."""
    full = [k for k in known if k.rpartition(".")[2] == name]
    return f"did you mean {' or '.join(full)}?" if full else nearest(name, list(known))


def _escaped(value: Any) -> Any:
    """For OmegaConf to write and read again as it is: a `${` that stands in a value by now is no interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _yaml_problem(error: Exception) -> str:
    """What is wrong and where, from a YAML error, whose own text takes several lines."""
    mark = getattr(error, "problem_mark", None)
    return _first_line(error) if mark is None else f"line {mark.line + 1}: {getattr(error, 'problem', '')}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]

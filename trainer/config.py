"""Config: a run's configuration, put together as schema <- YAML file <- key=value, and checked."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.schema import OWN_OPTIONS, Checkpoint, Data, Launch, Model, Optim, Train, setting

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
INT_OR_RANGE, FLOAT_OR_AUTO = "int or MIN-MAX", "float or auto"
LARGEST_BATCH = 10**9  # that is ever proposed: a wide range of nodes shares no batch size that anyone would want


class ConfigError(ValueError):
    """The command or the configuration is wrong: one line that names the field, the value and the fix."""


@dataclass
class Config:
    """The whole configuration of a run; `Config.load` makes one."""

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

    @classmethod
    def load(
        cls, source: str | Path | None = None, overrides: Sequence[str] = (), site: str | Path | None = None
    ) -> Config:
        """The schema, filled from the YAML file of a site (a path, or a name in configs/site/), then from that of a
        configuration (a path, or a name in configs/), then from `key=value` words.

        Raises ConfigError, which names the field, the value and the fix.
        """
        config = cls.read(source, overrides, site)
        validate(config)
        return config

    @classmethod
    def read(
        cls, source: str | Path | None = None, overrides: Sequence[str] = (), site: str | Path | None = None
    ) -> Config:
        """`load`, but the values are not checked."""
        tree = OmegaConf.structured(cls)
        files = [find_config(site, of_site=True)] if site else []
        files += [find_config(source)] if source is not None else []
        for path in files:
            for key, value in _leaves(_read_yaml(path)):
                try:
                    _assign(tree, key, value)
                except ConfigError as error:
                    raise ConfigError(f"{path}: {error}") from None
        for word in overrides:
            for key, value in _leaves(_parse_override(word)):
                _assign(tree, key, value)
        try:
            config: Config = OmegaConf.to_object(tree)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {_first_line(error)}") from None
        return config

    def to_yaml(self) -> str:
        """The resolved configuration as YAML; `Config.load` of it gives an equal Config."""
        return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(self))))

    def save(self, path: Path) -> None:
        """Write `to_yaml` to `path`, whole or not at all."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self.to_yaml())
        temporary.replace(path)


def variants(config: Config, changes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Config, str]]:
    """A configuration with each of these changes (values by dotted key, the same keys in each), and its YAML.

    Does for a thousand in seconds what `Config.load` and `to_yaml` do for one. Raises ConfigError.
    """
    typed = OmegaConf.structured(config)
    plain = OmegaConf.create(_escaped(dataclasses.asdict(config)))
    for change in changes:
        changed = config
        for key, value in change.items():
            _assign(typed, key, value)
            value = OmegaConf.select(typed, key)
            value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            changed = _replaced(changed, key.split("."), value)
            OmegaConf.update(plain, key, _escaped(value))
        validate(changed)
        yield changed, OmegaConf.to_yaml(plain)


def _replaced(tree: Any, names: Sequence[str], value: Any) -> Any:
    """Nested dataclasses and dictionaries with one leaf replaced."""
    if not names:
        return value
    name, *rest = names
    if isinstance(tree, dict):
        return {**tree, name: _replaced(tree.get(name, {}), rest, value)}
    return dataclasses.replace(tree, **{name: _replaced(getattr(tree, name), rest, value)})


def parse_override(word: str) -> dict[str, Any]:
    """Values by dotted key of a `key=value` word. Raises ConfigError."""
    return dict(_leaves(_parse_override(word)))


def fields_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Each leaf of a Config (or of its class) as (dotted key, field, value or default), in the schema's order."""
    value_of = schema() if isinstance(schema, type) else schema
    for f in dataclasses.fields(value_of):
        value = getattr(value_of, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value


def kind_of(f: dataclasses.Field[Any]) -> str:
    """The type of a leaf, as one would say it."""
    return str(f.type).replace("float | int | str", FLOAT_OR_AUTO).replace("int | str", INT_OR_RANGE)


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint for a wrong name: the nearest valid one, else some or all of them."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose from {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def find_config(source: str | Path, of_site: bool = False) -> Path:
    """The YAML file for a name in configs/, or in configs/site/, or for a path. Raises ConfigError."""
    folder, option, label = (
        (CONFIGS / "site", "--site", "configs/site") if of_site else (CONFIGS, "--config", "configs")
    )
    for path in (Path(source), folder / f"{source}.yaml"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    raise ConfigError(f"{option} {source}: no such file, and no such name in {label}/; {nearest(str(source), names)}")


def validate(config: Config) -> None:
    """Refuse a configuration that cannot work, as far as words alone can tell; `checks` asks the machine."""
    check_values(config)
    check_batch(config.train.batch_size, config.launch.world_sizes, config.train.accumulate)


def check_values(config: Config) -> None:
    """`validate`, but for whether the ranks can share out the global batch."""
    for key, f, value in fields_of(config):
        choices, least = f.metadata["choices"], f.metadata["least"]
        if f.type == "list[str]" and not all(isinstance(line, str) for line in value):
            raise ConfigError(f"{key}={value}: must be of type list[str]")
        if choices and value not in choices:
            raise ConfigError(f"{key}={value}: {nearest(str(value), choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
        if least is not None and isinstance(value, (int, float)) and value < least:
            raise ConfigError(f"{key}={value}: must be at least {least:g}")
    if config.optim.lr == 0:
        raise ConfigError("optim.lr=0: nothing would be learned; give a positive learning rate")
    if config.train.ema_decay >= 1:
        raise ConfigError(f"train.ema_decay={config.train.ema_decay}: must be below 1, e.g. 0.999")
    for key in ("optim.clip_norm", "checkpoint.every_minutes", "launch.mem_gb"):
        section, name = key.split(".")
        if getattr(getattr(config, section), name) == 0:
            raise ConfigError(f"{key}=0: must be above 0; write {key}=null to turn it off")
    minutes = config.checkpoint.every_minutes
    if isinstance(minutes, str) and minutes != "auto":
        raise ConfigError(f"checkpoint.every_minutes={minutes}: must be of type {FLOAT_OR_AUTO} or null")
    launch = config.launch
    _check_nodes(launch)
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
    for option in launch.slurm:
        if instead := OWN_OPTIONS.get(str(option).replace("_", "-")):
            raise ConfigError(f"launch.slurm.{option}: Laststep sets this itself; use {instead}")
    if launch.init_method is not None:
        # An IPv6 address stands in brackets.
        at = re.fullmatch(r"env://|file:///.+|tcp://(?:[^:/\[\]]+|\[.+\]):(\d+)", launch.init_method)
        if not at or (at[1] and not 0 < int(at[1]) < 65536):
            raise ConfigError(
                f"launch.init_method={launch.init_method}: must be env://, tcp://HOST:PORT or file:///PATH"
            )
    if launch.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", launch.name):
        raise ConfigError(
            f"launch.name={launch.name!r}: use up to 200 letters, digits, '.', '_' and '-', a letter or digit first"
        )


def check_batch(batch_size: int, world_sizes: Iterable[int], accumulate: int) -> None:
    """Raise ConfigError unless the global batch divides into equal micro-batches for any of these numbers of ranks."""
    wrong, step = [], 1
    for size in world_sizes:
        step = math.lcm(step, size * accumulate)
        if batch_size % (size * accumulate):
            wrong.append(str(size))
        if step > LARGEST_BATCH:
            break
    if wrong:
        near = max(step, round(batch_size / step) * step)
        raise ConfigError(
            f"train.batch_size={batch_size}: not divisible by {', '.join(wrong)} ranks x "
            f"train.accumulate={accumulate}; {'use fewer nodes' if step > LARGEST_BATCH else f'{near} would be'}"
        )


def _check_nodes(launch: Launch) -> None:
    """Raise ConfigError unless launch.nodes is a number or a range."""
    given = f"launch.nodes={launch.nodes}"
    if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", str(launch.nodes)):
        raise ConfigError(f"{given}: must be of type {INT_OR_RANGE}")
    if not launch.node_counts:
        raise ConfigError(f"{given}: the smaller number comes first")
    if launch.node_counts[0] < 1:
        raise ConfigError(f"{given}: must be at least 1")


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
        kind = kind_of(known[open_key or key]).replace(" | None", " or null")
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

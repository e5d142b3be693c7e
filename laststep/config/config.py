"""Config: a run's configuration, built from the schema's defaults, YAML files and key=value words, then checked."""

from __future__ import annotations

import dataclasses
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from laststep.config.checks import validate
from laststep.config.errors import ConfigError, first_line, nearest
from laststep.config.keys import as_written, assign, escaped, fields_of, parse_override, replaced, values_of
from laststep.config.schema import COMMAND, SCRIPT, Settings
from laststep.rundir import write_whole

C = TypeVar("C", bound=Settings)
PACKAGED = Path(__file__).parent.parent / "configs"  # what ships with Laststep; in a clone, a link to its configs/


@dataclass
class Config(Settings):
    """The whole configuration of a run; create one with `Config.load`."""

    @classmethod
    def load(
        cls, source: str | Path | None = None, overrides: Sequence[str] = (), site: str | Path | None = None
    ) -> Config:
        """Load and check a configuration. Later layers override earlier ones:

        1. the schema's defaults,
        2. `site`: a YAML file (a path, or a name in configs/site/ here or in the package),
        3. `source`: a YAML file (a path, or a name in configs/ here or in the package),
        4. `overrides`: `key=value` words.

        Raises ConfigError, which names the field, the value and the fix.
        """
        config = cls.read(source, overrides, site)
        validate(config)
        return config

    @classmethod
    def read(
        cls, source: str | Path | None = None, overrides: Sequence[str] = (), site: str | Path | None = None
    ) -> Config:
        """`load`, without checking the values against their limits and each other."""
        files = [find_config(site, of_site=True)] if site else []
        files += [find_config(source)] if source is not None else []
        layers = [(path, _read_text(path)) for path in files]
        config = cls._build(layers, overrides)
        if source is not None and not keys_in(layers[-1][1]):
            raise ConfigError(
                f"--config {source}: sets no key, so Laststep's defaults would train; name the task in it"
            )
        return config

    @classmethod
    def parse(cls, text: str, overrides: Sequence[str] = (), source: str | Path = "configuration") -> Config:
        """`read`, from the text of a file; `source` names it in messages."""
        return cls._build([(source, text)], overrides)

    @classmethod
    def _build(cls, layers: Iterable[tuple[str | Path, str]], overrides: Sequence[str]) -> Config:
        tree = OmegaConf.structured(cls)
        for source, text in layers:
            try:
                for key, value in keys_in(text).items():
                    assign(tree, key, value)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
        for word in overrides:
            for key, value in parse_override(word).items():
                assign(tree, key, value)
        try:
            config: Config = OmegaConf.to_object(tree)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {first_line(error)}") from None
        return _with_script(config)

    def to_yaml(self) -> str:
        """The resolved configuration as YAML; loading it gives an equal Config."""
        return OmegaConf.to_yaml(OmegaConf.create(escaped(dataclasses.asdict(self))))

    def save(self, path: Path) -> None:
        """Write `to_yaml` to `path` atomically."""
        write_whole(path, self.to_yaml())


def with_launch(config: C, **changed: Any) -> C:
    """The configuration with other values of these keys of `launch`."""
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, **changed))


def _with_script(config: Config) -> Config:
    """The configuration in which `task` says that a script trains, if one does. Raises ConfigError."""
    if config.script and config.task == COMMAND:
        return config
    if config.script and config.task not in (Settings.task, SCRIPT):
        raise ConfigError(f"script={shlex.join(config.script)}: task={config.task} would train too; leave one out")
    if not config.script and config.task in (SCRIPT, COMMAND):
        raise ConfigError(f"task={config.task}: name the script and its words: script=[train.py,--lr,3e-4]")
    return dataclasses.replace(config, task=SCRIPT) if config.script else config


def changed_ends(before: Settings, now: Settings) -> list[str]:
    """The keys by which a run may end elsewhere now than before; the words of a script may say where it ends."""
    ends = {"train.epochs": lambda of: of.train.epochs, "train.max_steps": lambda of: of.train.max_steps}
    return [key for key, value in {**ends, "script": lambda of: of.script}.items() if value(before) != value(now)]


def variants(config: Config, changes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Config, str]]:
    """Apply each of `changes` to `config`; yields the changed configuration and its YAML. Raises ConfigError.

    A change maps dotted keys to values; all changes must set the same keys. Gives the same results as `Config.load` and
    `to_yaml`, but handles a thousand changes in seconds.
    """
    typed = OmegaConf.structured(config)
    plain = OmegaConf.create(escaped(dataclasses.asdict(config)))
    for change in changes:
        changed = config
        for key, value in change.items():
            assign(typed, key, value)
            value = OmegaConf.select(typed, key)
            value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            changed = replaced(changed, key.split("."), value)
            OmegaConf.update(plain, key, escaped(value))
        validate(changed)
        yield changed, OmegaConf.to_yaml(plain)


def find_config(source: str | Path, of_site: bool = False) -> Path:
    """The YAML file of this path, or of this name: the user's own, else Laststep's. Raises ConfigError."""
    for path in (Path(source), *(folder / f"{source}.yaml" for folder in _folders(of_site))):
        if path.is_file():
            return path
    option, kind = ("--site", "site profile") if of_site else ("--config", "configuration")
    hint = nearest(str(source), config_names(of_site))
    raise ConfigError(f"{option} {source}: no such file, and no {kind} of that name; {hint}")


def config_names(of_site: bool = False) -> list[str]:
    """The names that `find_config` knows here, the user's own first."""
    found = (path.stem for folder in _folders(of_site) for path in sorted(folder.glob("*.yaml")))
    return list(dict.fromkeys(found))


def _folders(of_site: bool) -> list[Path]:
    """Where a name is looked up: in `configs/` of the current folder, then among those that ship with Laststep."""
    return [folder / "site" if of_site else folder for folder in (Path.cwd() / "configs", PACKAGED)]


def keys_in(text: str) -> dict[str, Any]:
    """The value for each dotted key that a YAML text sets. Raises ConfigError."""
    return values_of(*_load_yaml(text))


def missing_keys(text: str) -> list[str]:
    """The keys that a YAML text does not set, in the schema's order. Raises ConfigError when it cannot be read."""
    content, _ = _load_yaml(text)

    def is_set(key: str) -> bool:
        inner: Any = content
        for name in key.split("."):
            if not isinstance(inner, dict) or name not in inner:
                return False
            inner = inner[name]
        return True

    return [key for key, _, _ in fields_of(Settings) if not is_set(key)]


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {first_line(error)}") from None


def _load_yaml(text: str) -> tuple[dict[Any, Any], Any]:
    """What a YAML text holds, read by OmegaConf, and with each scalar as it was written. Raises ConfigError."""
    try:
        content, written = OmegaConf.to_container(OmegaConf.load(io.StringIO(text))), as_written(text)
    except Exception as error:  # a YAML error: there are many types
        raise ConfigError(f"cannot be read as YAML: {_yaml_problem(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError("must consist of `key: value` lines")
    return content, written


def _yaml_problem(error: Exception) -> str:
    """A YAML error as one line: its own text takes several."""
    mark = getattr(error, "problem_mark", None)
    return first_line(error) if mark is None else f"line {mark.line + 1}: {getattr(error, 'problem', '')}"

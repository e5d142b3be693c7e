"""A task's own settings: the section `args`, free, or checked against a dataclass of the user's."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import MethodType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, MissingMandatoryValue, OmegaConfBaseException

from laststep.config.errors import ConfigError, first_line, nearest
from laststep.config.keys import escaped, leaves
from laststep.config.reads import view


class FreeArgs(Namespace):
    """The settings as attributes, args.lr, and as a mapping: args["lr"], "lr" in args, args.items()."""

    def __getattr__(self, name: str) -> Any:
        raise MissingArg(f"args.{name}: not set; give it a value, as in args.{name}=1")

    def __getitem__(self, name: str) -> Any:
        try:
            value = getattr(self, name)
        except MissingArg as error:
            raise KeyError(str(error)) from None
        if isinstance(value, MethodType):
            raise KeyError(f"args.{name}: not set; give it a value, as in args.{name}=1")
        return value

    def __contains__(self, name: object) -> bool:
        return self.get(str(name), self) is not self

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a setting, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    def keys(self) -> KeysView[str]:
        """The names of all settings."""
        return vars(self).keys()

    def values(self) -> ValuesView[Any]:
        """The values of all settings."""
        return vars(self).values()

    def items(self) -> ItemsView[str, Any]:
        """The names and values of all settings."""
        return vars(self).items()


class MissingArg(ConfigError, AttributeError):
    """A setting that the function reads is not set. An AttributeError, so that getattr(args, name, default) works."""


def free_args(given: Mapping[str, Any]) -> FreeArgs:
    """Settings of any name."""
    return FreeArgs(**{name: free_args(value) if isinstance(value, dict) else value for name, value in given.items()})


def checked_args(schema: type, given: Mapping[str, Any]) -> Any:
    """An instance of the dataclass with these values. Raises ConfigError."""
    try:
        tree = OmegaConf.structured(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(_wrong_field(schema, error)) from None
    _thaw(tree)
    for key, value in leaves(given):
        try:
            OmegaConf.update(tree, key, escaped(value))
        except ConfigAttributeError:
            names = [name for name, _ in leaves(OmegaConf.to_container(tree))]
            raise ConfigError(f"args.{key}: {schema.__name__} has no such field; {nearest(key, names)}") from None
        except OmegaConfBaseException as error:
            raise ConfigError(f"args.{key}={value}: {first_line(error)}") from None
    try:
        return OmegaConf.to_object(tree)
    except MissingMandatoryValue as error:
        raise ConfigError(f"args.{error.full_key}: not set, and {schema.__name__} has no default for it") from None
    except Exception as error:  # the dataclass's own check, in __post_init__
        raise ConfigError(f"args: {schema.__name__} refuses them: {first_line(error)}") from None


def _wrong_field(schema: type, error: OmegaConfBaseException) -> str:
    """Which field of a dataclass OmegaConf refuses."""
    for field in dataclasses.fields(schema):
        if field.default is None and field.name == error.full_key:
            kind = str(getattr(field.type, "__name__", field.type))
            return f"args: {schema.__name__}.{field.name}: {kind} = None: write {field.name}: {kind} | None = None"
    name = f".{error.full_key}" if error.full_key else ""
    return f"args: {schema.__name__}{name} cannot hold settings: {first_line(error)}"


def user_args(settings: type | None, given: Mapping[str, Any], seen: set[str] | None = None) -> Any:
    """The `given` settings, as an instance of the user's dataclass if there is one, else as attributes. The dotted key
    of each that is read is added to `seen`. Raises ConfigError for settings that do not fit the dataclass."""
    args = free_args(given) if settings is None else checked_args(settings, given)
    return args if seen is None else view(args, "args.", seen)


def _thaw(tree: Any) -> None:
    """Let the fields be set for now, of frozen dataclasses too."""
    OmegaConf.set_readonly(tree, False)
    for name in tree:
        if not OmegaConf.is_missing(tree, name) and isinstance(tree[name], DictConfig):
            _thaw(tree[name])

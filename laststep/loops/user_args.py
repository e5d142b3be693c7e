"""A custom loop's own settings: the section `args`, free, or checked against the user's dataclass."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, MissingMandatoryValue, OmegaConfBaseException

from laststep.config.errors import ConfigError, first_line, nearest
from laststep.config.keys import escaped, leaves
from laststep.task import args_parameter


class FreeArgs(SimpleNamespace):
    """The settings as attributes: args.lr."""

    def __getattr__(self, name: str) -> Any:
        raise MissingArg(f"args.{name}: not set; give it a value, as in args.{name}=1")


class MissingArg(ConfigError, AttributeError):
    """A setting that the function reads is not set. An AttributeError, so that getattr(args, name, default) works."""


def user_args(function: Callable[..., Any], given: Mapping[str, Any]) -> tuple[Any, bool]:
    """The settings for this function, and whether it takes them as its second argument.

    They are an instance of the dataclass with which that argument is annotated, if it is, else a FreeArgs. Raises
    ConfigError for settings that do not fit the dataclass.
    """
    parameter = args_parameter(function)
    annotation = None if parameter is None else _resolved(function, parameter)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _checked(annotation, given), True
    return _free(given), parameter is not None


def _free(given: Mapping[str, Any]) -> FreeArgs:
    return FreeArgs(**{name: _free(value) if isinstance(value, dict) else value for name, value in given.items()})


def _resolved(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter, which is text where the module imports `annotations` from __future__."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    first, *rest = parameter.annotation.strip("'\"").split(".")
    if not all(map(str.isidentifier, [first, *rest])):
        return None  # an expression such as `dict[str, int]`: no dataclass
    try:
        return functools.reduce(getattr, rest, {**vars(builtins), **vars(inspect.getmodule(function))}[first])
    except (KeyError, AttributeError):
        raise ConfigError(
            f"def {function.__name__}(run, args: {parameter.annotation}): its module has no such class when it is run; "
            "import it there, outside `if TYPE_CHECKING`"
        ) from None


def _checked(schema: type, given: Mapping[str, Any]) -> Any:
    """An instance of the dataclass with these values. Raises ConfigError."""
    try:
        tree = OmegaConf.structured(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(f"args: {schema.__name__} cannot hold settings: {first_line(error)}") from None
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


def _thaw(tree: Any) -> None:
    """Let the fields be set for now, of frozen dataclasses too."""
    OmegaConf.set_readonly(tree, False)
    for name in tree:
        if not OmegaConf.is_missing(tree, name) and isinstance(tree[name], DictConfig):
            _thaw(tree[name])

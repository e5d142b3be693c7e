"""The optimisers of torch.optim by name, and the arguments of each. Read from torch's source: importing it takes
seconds, and a command must refuse a wrong name at once."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from laststep.config.errors import ConfigError, nearest
from laststep.config.schema import Optim

FIRST = ("sgd", "adamw")  # in lists of names
UNSUPPORTED = {
    "lbfgs": "LBFGS repeats the forward pass within a step (it needs a closure), which no loop here does",
    "sparseadam": "SparseAdam takes sparse gradients only, which ranks cannot average",
}
# Arguments of constructors that have a key of their own.
KEYS = {"lr": "optim.lr", "weight_decay": "optim.weight_decay"}


def optimizer_names() -> list[str]:
    """Every valid `optim.name`, in lower case."""
    return [*FIRST, *sorted(_sources().keys() - {*FIRST, *UNSUPPORTED})]


def class_name(name: str) -> str:
    """The name of the class in torch.optim, from an `optim.name` in any case: rmsprop -> RMSprop."""
    return _sources()[name.lower()][0]


def check_optimizer(optim: Optim) -> None:
    """Raise ConfigError unless torch.optim has this optimiser, and it takes these arguments."""
    name = optim.name.lower()
    if name in UNSUPPORTED:
        raise ConfigError(f"optim.name={optim.name}: {UNSUPPORTED[name]}; choose another optimiser, e.g. adamw")
    if name in FIRST and not optim.args:
        return  # every torch has these, with weight decay: most commands need not read its source
    if not _sources():  # a login node that submits ranks into a container image may lack torch
        return
    if name not in _sources():
        raise ConfigError(f"optim.name={optim.name}: torch.optim has no such class; {nearest(name, optimizer_names())}")
    known = _arguments(name)
    keys = {**KEYS, "momentum": "optim.momentum"} if name == "sgd" else KEYS
    for argument, value in optim.args.items():
        if argument in keys:
            raise ConfigError(f"optim.args.{argument}: set {keys[argument]} instead")
        if argument not in known:
            taken = ", ".join(other for other in known if other not in keys)
            raise ConfigError(f"optim.args.{argument}: {optim.name} has no such argument; it takes {taken}")
        if wanted := _mismatch(value, known[argument]):
            raise ConfigError(f"optim.args.{argument}={value}: must be {wanted}")
    if optim.weight_decay and "weight_decay" not in known:
        raise ConfigError(f"optim.weight_decay={optim.weight_decay}: {optim.name} has no weight decay; set it to 0")


@functools.cache
def _sources() -> dict[str, tuple[str, Path]]:
    """The classes of torch.optim and the files that define them, by their names in lower case."""
    spec = importlib.util.find_spec("torch")
    found = {}
    for folder in spec.submodule_search_locations or [] if spec else []:
        for source in (Path(folder) / "optim").glob("*.py"):
            for name in re.findall(r"^class (\w+)\((?:Optimizer|Adam)\):", source.read_text(), re.MULTILINE):
                found[name.lower()] = name, source
    return found


@functools.cache
def _arguments(name: str) -> dict[str, Any]:
    """The arguments of an optimiser's constructor, without the parameters, and their defaults; `...` where it has none
    that is written out."""
    class_name, source = _sources()[name]
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    missing = [None] * (len(given.args) - len(given.defaults))
                    defaults = [_literal(node) for node in (*missing, *given.defaults, *given.kw_defaults)]
                    names = [argument.arg for argument in (*given.args, *given.kwonlyargs)]
                    return dict(list(zip(names, defaults))[2:])  # without self and params
    return {}


def _literal(node: ast.expr | None) -> Any:
    try:
        return ... if node is None else ast.literal_eval(node)
    except ValueError:
        return ...


def _mismatch(value: Any, default: Any) -> str | None:
    """What a value must be, if its type is not that of the default: torch notices some only in the first step."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, (int, float)):
        return None if _is_number(value) else "a number"
    if isinstance(default, tuple):
        is_list = isinstance(value, list) and len(value) == len(default)
        fits = is_list and all(_is_number(item) or item is standard for item, standard in zip(value, default))
        return None if fits else f"a list of {len(default)} numbers, such as {list(default)}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""The optimisers of torch.optim by name, and the arguments of each: torch's own where it is loaded, else from a table.

Importing torch takes seconds, and a command must refuse a wrong name at once. A test compares the table with torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
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
Arguments = dict[str, Any]  # of a constructor, without the parameters, and their defaults; `...` for one that has none

_ADAM: Arguments = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0}
_COMMON: Arguments = {"foreach": None, "maximize": False, "differentiable": False, "capturable": False}
# As in torch 2.11 to 2.14. Whether an argument is a switch, a number or a tuple is all that is read of a default.
_TABLE: dict[str, Arguments] = {
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-06, "weight_decay": 0, **_COMMON},
    "Adafactor": {
        **{"lr": 0.01, "beta2_decay": -0.8, "eps": (None, 0.001), "d": 1.0, "weight_decay": 0.0},
        **{"foreach": None, "maximize": False},
    },
    "Adagrad": {
        **{"lr": 0.01, "lr_decay": 0, "weight_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10},
        **{"foreach": None, "maximize": False, "differentiable": False, "fused": None},
    },
    "Adam": {**_ADAM, "amsgrad": False, **_COMMON, "fused": None, "decoupled_weight_decay": False},
    "AdamW": {**_ADAM, "weight_decay": 0.01, "amsgrad": False, **_COMMON, "fused": None},
    "Adamax": {**_ADAM, "lr": 0.002, **_COMMON},
    "ASGD": {"lr": 0.01, "lambd": 0.0001, "alpha": 0.75, "t0": 1e6, "weight_decay": 0, **_COMMON},
    "Muon": {
        **{"lr": 0.001, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True},
        **{"ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-07, "ns_steps": 5, "adjust_lr_fn": None},
    },
    "NAdam": {**_ADAM, "lr": 0.002, "momentum_decay": 0.004, "decoupled_weight_decay": False, **_COMMON},
    "RAdam": {**_ADAM, "decoupled_weight_decay": False, **_COMMON},
    "RMSprop": {
        **{"lr": 0.01, "alpha": 0.99, "eps": 1e-08, "weight_decay": 0, "momentum": 0, "centered": False},
        **_COMMON,
    },
    "Rprop": {"lr": 0.01, "etas": (0.5, 1.2), "step_sizes": (1e-06, 50), **_COMMON},
    "SGD": {
        **{"lr": 0.001, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False},
        **{"foreach": None, "maximize": False, "differentiable": False, "fused": None},
    },
}


def optimizer_names() -> list[str]:
    """Every valid `optim.name`, in lower case."""
    return [*FIRST, *sorted(_known().keys() - {*FIRST, *UNSUPPORTED})]


def class_name(name: str) -> str:
    """The name of the class in torch.optim, from an `optim.name` in any case: rmsprop -> RMSprop."""
    return _known()[name.lower()][0]


def check_optimizer(optim: Optim) -> None:
    """Raise ConfigError unless torch.optim has this optimiser, and it takes these arguments."""
    name = optim.name.lower()
    if name in UNSUPPORTED:
        raise ConfigError(f"optim.name={optim.name}: {UNSUPPORTED[name]}; choose another optimiser, e.g. adamw")
    if name not in (all_known := _known()):
        if importlib.util.find_spec("torch") is None:  # a login node that submits ranks into a container image
            return
        raise ConfigError(f"optim.name={optim.name}: torch.optim has no such class; {nearest(name, optimizer_names())}")
    known = all_known[name][1]
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


def _known() -> dict[str, tuple[str, Arguments]]:
    """The classes of torch.optim and their arguments, by the names of the classes in lower case."""
    torch = sys.modules.get("torch")
    table = _TABLE if getattr(torch, "optim", None) is None else _of_torch(torch)
    return {name.lower(): (name, arguments) for name, arguments in table.items()}


def _of_torch(torch: Any) -> dict[str, Arguments]:
    classes = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    return {
        name: {
            argument.name: ... if argument.default is argument.empty else argument.default
            for argument in list(inspect.signature(kind).parameters.values())[1:]
        }
        for name, kind in classes.items()
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }


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

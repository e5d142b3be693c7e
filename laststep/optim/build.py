"""Makes the optimiser that the configuration asks for, checks one that a task has made, and restores its state."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laststep.config.errors import ConfigError, first_line
from laststep.config.schema import Optim
from laststep.optim.names import UNSUPPORTED, check_optimizer, class_name

SORTED: dict[str, str | int] = {"parameters": "in the model's order"}  # in the numerics of a checkpoint
# Fused optimisers can skip a step by a flag on the device.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
NOT_FUSED = {"foreach", "differentiable", "dampening"}  # arguments that keep them from being fused


def make_optimizer(model: nn.Module, optim: Optim, more_undecayed: Sequence[nn.Parameter] = ()) -> Optimizer:
    """The optimiser of the configuration, for the model's trainable parameters. Raises ConfigError.

    With optim.decay_norms_and_biases=false there is no weight decay for `more_undecayed` either.
    """
    check_optimizer(optim)
    kind = getattr(torch.optim, class_name(optim.name))
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = parameters
    arguments: dict[str, Any] = {"lr": optim.lr}
    if "weight_decay" in inspect.signature(kind).parameters:
        arguments["weight_decay"] = optim.weight_decay
        if not optim.decay_norms_and_biases:
            undecayed = {id(p) for p in parameters if p.ndim <= 1} | {id(p) for p in more_undecayed}
            decayed, others = [[p for p in parameters if (id(p) in undecayed) is which] for which in (False, True)]
            groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    if kind is torch.optim.SGD:
        arguments["momentum"] = optim.momentum
    if kind in FUSED and not NOT_FUSED & optim.args.keys():
        arguments["fused"] = True
    try:
        optimizer: Optimizer = kind(groups, **{**arguments, **optim.args})
    except Exception as error:  # each class checks its arguments in its own way
        given = f"optim.args={optim.args}" if optim.args else f"optim.name={optim.name}"
        raise ConfigError(f"{given}: {kind.__name__} refuses: {first_line(error)}") from error
    return optimizer


def take_made(optimizer: Any, model: nn.Module, task: str) -> tuple[Optimizer, bool]:
    """The optimiser of the model that `task` has made, with its parameters in the model's order, and whether they were
    in another one. Raises ConfigError for one that the loop cannot use."""
    made = f"task={task}: optimizer()"
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{made} must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
    for base in type(optimizer).__mro__:
        if reason := UNSUPPORTED.get(base.__name__.lower()):
            raise ConfigError(f"{made}: {reason}")
    if not all("lr" in group for group in optimizer.param_groups):
        raise ConfigError(f"{made}: a parameter group has no lr, which the schedule sets")
    given = {id(p) for p in parameters_of(optimizer)}
    if strangers := len(given - {id(p) for p in model.parameters()}):
        raise ConfigError(f"{made}: {strangers} of its parameters are not the model's; build it from the model given")
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
    if left_out:
        named = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        raise ConfigError(
            f"{made} leaves out {len(left_out)} of the model's parameters ({named}); add them, or freeze them in "
            "model() with requires_grad_(False)"
        )
    return optimizer, sort_parameters(optimizer, model.parameters())


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """What the optimiser updates, in the order of its numbers for them."""
    groups = getattr(optimizer, "param_groups", [])  # a wrapper that is refused later may have none
    return [parameter for group in groups for parameter in group["params"]]


def sort_parameters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Have each group list its parameters in this order; returns whether any did not. Code that makes a group from a
    set lists them in another order in each process, and an optimiser's state is saved by their numbers."""
    changed = False
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    for group in optimizer.param_groups:
        listed = [places.get(id(parameter), -1) for parameter in group["params"]]
        order = sorted(range(len(listed)), key=listed.__getitem__)
        changed |= order != list(range(len(listed)))
        for name in {"params", "param_names"} & group.keys():
            group[name][:] = [group[name][number] for number in order]
    return changed


def check_order(changed: bool, numerics: Mapping[str, Any]) -> None:
    """Raise ConfigError for a checkpoint of an older version, with these numerics, that numbers the parameters as the
    optimiser listed them, if `sort_parameters` has `changed` that."""
    if changed and not SORTED.items() <= numerics.items():
        raise ConfigError(
            "this run's checkpoints are of an older version of Laststep, which numbered the optimiser's parameters as "
            "its groups list them; this version numbers them as the model does. End the run with the version that "
            "began it, or begin another one with its weights (model.weights)"
        )


def fill_momentum(optimizer: Optimizer) -> None:
    """Create the momentum of fused SGD now: if the very first step is skipped, torch leaves this memory
    uninitialised."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            if group["fused"] and group["momentum"] and not group["dampening"]:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def clear_gradients(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad()` in a tenth of the time: torch also makes an entry for its profiler."""
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        return optimizer.zero_grad()  # its class, or the user, has replaced it
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def loads_in_place(optimizer: Optimizer) -> bool:
    """Whether the optimiser keeps its state on the device of its parameters, and takes over the tensors that it loads.
    One with a load_state_dict of its own may keep its state anywhere."""
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`, bit for bit: torch rounds each tensor to the dtype of its parameter, such as
    float32 averages for bfloat16 weights."""
    optimizer.load_state_dict(state)
    if not loads_in_place(optimizer):
        return  # it knows best
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer)):
        for name, saved in state["state"].get(number, {}).items():
            live = optimizer.state[parameter][name]
            if isinstance(saved, Tensor) and saved.dtype != live.dtype:
                optimizer.state[parameter][name] = saved.to(live.device)


def schedule_keys(optim: Optim) -> set[str]:
    """The keys that `scheduled` reads over a whole run."""
    return {"optim.schedule", "optim.warmup_steps", *(["optim.decay_share"] if optim.schedule == "wsd" else [])}


def scheduled(lr: float, optim: Optim, step: int, total_steps: int) -> float:
    """The learning rate of `step` (from 0) for the peak `lr`, a pure function: linear warm-up, then cosine to 0, or a
    tenth after each third of the run (step), or constant, or constant and at the end linearly to 0 (wsd)."""
    if step < optim.warmup_steps:
        return lr * (step + 1) / (optim.warmup_steps + 1)
    done = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    if optim.schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * done))
    if optim.schedule == "step":
        return lr * 0.1 ** int(3 * done)
    if optim.schedule == "wsd":  # warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)
        return lr * min(1.0, (total_steps - step) / max(1, round(optim.decay_share * total_steps)))
    return lr


ROWS, COLUMNS = 8, 6
STEPS = 3  # the first step of some optimisers is different


def needs_other_rows(optimizer: Optimizer) -> bool:
    """Whether what the optimiser does to a row depends on other rows. False for one that cannot be tried."""
    device = parameters_of(optimizer)[0].device
    values = torch.linspace(-1, 2, ROWS * COLUMNS, device=device).view(ROWS, COLUMNS)
    parts = (values, values, *values.split(ROWS // 2))
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            (whole, only_rows), (again, _), *halves = (_tried(optimizer, part) for part in parts)
    except Exception:  # it may keep something for each parameter that it was made with
        return False
    together = torch.cat([half for half, _ in halves])
    return not only_rows or (torch.equal(whole, again) and not torch.allclose(whole, together, rtol=1e-3, atol=1e-5))


def kept_by(optimizer: Optimizer) -> set[str] | None:
    """The names of what the optimiser keeps for each parameter; None for one that cannot be tried."""
    device = parameters_of(optimizer)[0].device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return set(_trial(optimizer, torch.ones(ROWS, COLUMNS, device=device))[1])
    except Exception:
        return None


def _tried(optimizer: Optimizer, values: Tensor) -> tuple[Tensor, bool]:
    """What these values are after some steps, and whether all that the optimiser keeps has their shape."""
    parameter, state = _trial(optimizer, values)
    kept = [tensor for tensor in state.values() if isinstance(tensor, Tensor) and tensor.numel() > 1]
    return parameter, all(tensor.shape == values.shape for tensor in kept)


def _trial(optimizer: Optimizer, values: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What these values are after some steps, and what the optimiser keeps for them."""
    parameter = nn.Parameter(values.clone())
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer))
    trial.__dict__.pop("step", None)  # a schedule may have put its own there, which steps the optimiser itself
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict):  # hooks
            setattr(trial, name, OrderedDict())
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], "params": [parameter], "lr": 0.1}]
    for step in range(STEPS):
        parameter.grad = values.cos() * (step + 1)
        trial.step()
    return parameter.detach(), dict(trial.state[parameter])

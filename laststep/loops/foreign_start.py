"""What a run starts from that another tool has saved: weights and the state of optimisers (checkpoint.start_from).

Rank 0 alone reads it and decides what fits; the others get its tensors, one at a time. So a file that changes meanwhile
cannot make ranks differ. A resumed run has its own state, and reads no other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laststep.checkpoint.export import plain_name, weights_sha256
from laststep.checkpoint.foreign import Foreign, OptimizerState, read
from laststep.checkpoint.shards import is_distributed, local_of, new_like, shard_count
from laststep.config.errors import ConfigError
from laststep.loops.initial_weights import note_source
from laststep.loops.snapshot import bytes_of
from laststep.optim.build import kept_by, load_optimizer
from laststep.ranks.group import Group
from laststep.ranks.world import shard_rows
from laststep.say import counted

SHOWN = 3  # names in a line
KEY = "checkpoint.start_from"
PATIENCE_S = 24 * 3600.0  # a disk may be slow
Named = Mapping[str, Tensor]


@dataclass
class Plan:
    """What rank 0 has decided: what each object takes, by its name in the run."""

    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    optimizers: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)  # by the numbers of parameters
    lines: list[str] = field(default_factory=list)

    def described(self) -> str:
        """The same without the tensors' values, as text."""

        def of(value: Any) -> Any:
            if isinstance(value, Tensor):
                return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            return [value]

        weights = {name: {key: of(each) for key, each in named.items()} for name, named in self.weights.items()}
        states = {
            name: {number: {key: of(each) for key, each in kept.items()} for number, kept in state.items()}
            for name, state in self.optimizers.items()
        }
        return json.dumps([weights, states])


def start_from(
    given: str,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    group: Group,
    record: Path,
    say: Callable[[str], None],
) -> None:
    """Load what is at the path `given` into these objects, by names, and say what does not fit. A collective. Raises
    ConfigError when nothing fits, or it cannot be read."""
    plan = Plan()
    if group.world.rank == 0:
        found = read(Path(given))
        plan = fit(found, modules, optimizers, given)
        kept = {f"{name}.{key}": each for name, named in found.weights.items() for key, each in named.items()}
        for line in (*plan.lines, *note_source(record, given, weights_sha256(kept))):
            say(line)
    group.barrier(PATIENCE_S)
    (described,) = [each for each in group.gather_bytes(plan.described().encode()) if each != b"[{}, {}]"][:1] or [b""]
    weights, states = json.loads(described)
    for name, named in weights.items():
        targets = _targets(modules[name])
        for key, what in named.items():
            _fill(targets[key], _received(plan.weights.get(name, {}).get(key), what, group), group)
    for name, state in states.items():
        optimizer = optimizers[name]
        parameters = _parameters(optimizer)
        own = plan.optimizers.get(name, {})
        filled: dict[int, dict[str, Any]] = {}
        for number, kept in state.items():
            parameter = parameters[int(number)]
            filled[int(number)] = {
                key: _state_of(parameter, own.get(int(number), {}).get(key), what, group) for key, what in kept.items()
            }
        load_optimizer(optimizer, {**optimizer.state_dict(), "state": filled})


def fit(found: Foreign, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], source: str) -> Plan:
    """What these objects take of a checkpoint. Raises ConfigError when a module takes nothing."""
    plan = Plan()
    taken: set[str] = set()
    renamed: dict[str, Callable[[str], str]] = {}
    for name, module in modules.items():
        key = _match(name, list(found.weights), len(modules))
        if key is None:
            holds = ", ".join(found.weights) or "none"
            raise ConfigError(
                f"{KEY}={source}: which of its models is {name}? It holds {holds}; register one by such a name"
            )
        taken.add(key)
        wanted = _targets(module)
        rename = renamed[name] = _renaming(wanted.keys(), found.weights[key].keys())
        there = {rename(plain_name(each)): tensor for each, tensor in found.weights[key].items()}
        fits = {each: there[each] for each in wanted.keys() & there.keys() if _fits(there[each], wanted[each])}
        if not fits:
            raise ConfigError(
                f"{KEY}={source}: weights of another model: none of its {len(there)} tensors fits {name} by name and "
                f"shape; it has {_few(there)}, {name} has {_few(wanted)}"
            )
        plan.weights[name] = {each: fits[each] for each in wanted if each in fits}
        lacks = [each for each in wanted if each not in fits and not each.endswith("num_batches_tracked")]
        unused = [each for each in there if each not in fits]
        rest = f"; left as initialised: {_few(lacks)}" if lacks else ""
        rest += f"; not taken: {_few(unused)}" if unused else ""
        plan.lines.append(f"{name}: {len(fits)} of {counted(len(wanted), 'tensor')} from {source}{rest}")
    rename_any = next(iter(renamed.values()), plain_name) if len(renamed) == 1 else plain_name
    names = {id(each): (name, key) for name, module in modules.items() for key, each in module.named_parameters()}
    for name, optimizer in optimizers.items():
        key = _match(name, list(found.optimizers), len(optimizers))
        if key is None:
            has = ", ".join(found.optimizers) or "no optimiser"
            plan.lines.append(f"{name}: begins without state: the checkpoint has {has}")
            continue
        taken.add(key)
        state, why = _state(optimizer, found.optimizers[key], names, rename_any)
        of = len(_parameters(optimizer))
        if state:
            plan.optimizers[name] = state
            plan.lines.append(f"{name}: the state of {len(state)} of {counted(of, 'parameter')}, {why}")
        else:
            plan.lines.append(f"{name}: begins without state: {why}")
    left = [each for each in (*found.left, *found.weights, *found.optimizers) if each not in taken]
    if left:
        plan.lines.append(f"not taken from {source}: {_few(left)}; the run begins at step 0, with its own schedule")
    return plan


def _match(name: str, there: list[str], here: int) -> str | None:
    """The key of what belongs to the object of this name: one of the same name, or the only one if it is alone. Never
    the first of several."""
    same = [key for key in there if key in (name, f"{name}_state_dict", f"{name}_state")]
    if same:
        return same[0]
    return there[0] if len(there) == here == 1 else None


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """The tensors to fill, by their plain names."""
    named = module.state_dict(keep_vars=True)
    found = {plain_name(name): each for name, each in named.items() if isinstance(each, Tensor)}
    if all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): each for name, each in found.items()}
    return found


def _renaming(wanted: Iterable[str], there: Iterable[str]) -> Callable[[str], str]:
    """How the names there become those here: perhaps one prefix, of a wrapper, has to go or to come."""
    here, others = set(wanted), [plain_name(name) for name in there]
    ways: list[tuple[str, str]] = [("", "")]
    ways += [(name[: end + 1], "") for name in others[:1] for end in range(len(name)) if name[end] == "."]
    ways += [("", name[: end + 1]) for name in sorted(here)[:1] for end in range(len(name)) if name[end] == "."]

    def renamed(name: str, way: tuple[str, str]) -> str:
        gone, added = way
        return added + plain_name(name).removeprefix(gone)

    best = max(ways, key=lambda way: sum(renamed(name, way) in here for name in others))
    return lambda name: renamed(name, best)


def _fits(there: Tensor, wanted: Tensor) -> bool:
    loses = wanted.dtype.is_floating_point and not there.dtype.is_floating_point
    return there.shape == wanted.shape and there.layout is torch.strided and not loses


def _state(
    optimizer: Optimizer,
    found: OptimizerState,
    names: Mapping[int, tuple[str, str]],
    rename: Callable[[str], str],
) -> tuple[dict[int, dict[str, Any]], str]:
    """The state by the numbers of this optimiser's parameters, and how it was matched or why there is none."""
    parameters = _parameters(optimizer)
    if found.by_name:
        there = {rename(name): kept for name, kept in found.by_name.items()}
        own = {number: plain_name(names[id(p)][1]) for number, p in enumerate(parameters) if id(p) in names}
        own = {number: name.removeprefix("module.") for number, name in own.items()}
        matched = {number: there[name] for number, name in own.items() if name in there}
        how = "by their names"
    else:
        sizes, here = [len(group) for group in found.groups], [len(group["params"]) for group in optimizer.param_groups]
        if sizes != here:
            listed = " + ".join(map(str, sizes)) or "no"
            return {}, f"it numbers {listed} parameters, and this run's {' + '.join(map(str, here))}"
        matched = dict(enumerate(kept for group in found.groups for kept in group))
        how = "by their places in its groups"
        for number, kept in matched.items():
            if any(not _matches(value, parameters[number]) for value in kept.values()):
                return {}, f"its parameter {number} has another shape than this run's"
    fitting = {
        n: kept for n, kept in matched.items() if kept and all(_matches(v, parameters[n]) for v in kept.values())
    }
    if not fitting:
        return {}, "it has none for these parameters"
    keys = {key for kept in fitting.values() for key in kept}
    expected = kept_by(optimizer)
    if expected is not None and keys != expected:
        return {}, f"it keeps {_few(sorted(keys))}, and this run's {type(optimizer).__name__} {_few(sorted(expected))}"
    return fitting, how


def _matches(value: Any, parameter: Tensor) -> bool:
    """Whether a value of the state may belong to a parameter."""
    if isinstance(value, Tensor):
        return value.numel() <= 1 or value.shape == parameter.shape
    return value is None or isinstance(value, (int, float, str))


def _received(own: Tensor | None, what: Any, group: Group) -> Any:
    """A tensor of rank 0, on the device of each rank; or a value that is none. A collective."""
    if isinstance(what, list):
        return what[0]
    whole = torch.empty(what["shape"], dtype=getattr(torch, what["dtype"]), device=group.device)
    if own is not None:
        whole.copy_(own)
    group.broadcast([bytes_of(whole)] if whole.numel() else [])
    return whole


def _fill(target: Tensor, whole: Tensor, group: Group) -> None:
    """Copy a full tensor into one that this rank may hold only rows of."""
    with torch.no_grad():
        local_of(target).copy_(_rows(target, whole, group))


def _state_of(parameter: Tensor, own: Any, what: Any, group: Group) -> Any:
    """A value of an optimiser's state, laid out like its parameter. A collective."""
    whole = _received(own if isinstance(own, Tensor) else None, what, group)
    if not isinstance(whole, Tensor):
        return whole
    if whole.dim() == 0:
        return whole.cpu()  # where it belongs is for the optimiser to say
    if not is_distributed(parameter) or whole.shape != parameter.shape:
        return whole
    like = new_like(parameter, whole.dtype)
    _fill(like, whole, group)
    return like


def _rows(target: Tensor, whole: Tensor, group: Group) -> Tensor:
    if shards := shard_count(target):
        return whole[slice(*shard_rows(len(whole), group.world.rank % shards, shards))]
    return whole


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{', '.join(listed[:SHOWN])}{more}" or "nothing"

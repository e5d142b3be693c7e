"""What a run starts from: weights of a file or a name (model.weights), or what another tool has saved, with the state
of its optimisers (checkpoint.start_from). A resumed run has its own state, and reads no other.

Rank 0 alone reads them and decides what fits (`Plan`); the others get its tensors, one at a time (`apply_plan`). So a
file that changes meanwhile cannot make ranks differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laststep.checkpoint.export import plain_name, read_source, weights_sha256
from laststep.checkpoint.foreign import Foreign, OptimizerState, read
from laststep.checkpoint.shards import is_distributed, local_of, shard_count, sharded_like
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.snapshot import bytes_of
from laststep.optim.build import kept_by, load_optimizer, parameters_of
from laststep.ranks.group import Group
from laststep.ranks.world import shard_rows
from laststep.say import counted
from laststep.tasks.models import is_weights_name, pretrained_weights

SHOWN = 3  # names in a message
KEY = "checkpoint.start_from"
PATIENCE_S = 24 * 3600.0  # a disk may be slow


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


def apply_plan(plan: Plan, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], group: Group) -> None:
    """Give these objects what rank 0's plan says; what it lacks stays as it is. The others' plans do not count. A
    collective."""
    group.barrier(PATIENCE_S)
    weights, states = json.loads(group.broadcast_bytes(plan.described().encode()))
    for name, named in weights.items():
        targets, own = modules[name].state_dict(keep_vars=True), plan.weights.get(name, {})
        for key, what in named.items():
            fill(targets[key], _received(own.get(key), what, group), group)
    for name, state in states.items():
        optimizer = optimizers[name]
        parameters, of_name = parameters_of(optimizer), plan.optimizers.get(name, {})
        filled: dict[int, dict[str, Any]] = {}
        for number, kept in ((int(number), kept) for number, kept in state.items()):
            mine = of_name.get(number, {})
            filled[number] = {
                key: _state_of(parameters[number], mine.get(key), what, group) for key, what in kept.items()
            }
        load_optimizer(optimizer, {**optimizer.state_dict(), "state": filled})


def plan_for(
    given: str,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    group: Group,
    record: Path,
    say: Callable[[str], None],
) -> Plan:
    """On rank 0, what these objects take, by names, of what is at the path `given`; says what does not fit. Raises
    ConfigError when nothing fits, or it cannot be read."""
    if group.world.rank:
        return Plan()
    found = read(Path(given))
    plan = _fit_foreign(found, modules, optimizers, given)
    kept = {f"{name}.{key}": each for name, named in found.weights.items() for key, each in named.items()}
    for line in (*plan.lines, *note_source(record, given, weights_sha256(kept))):
        say(line)
    return plan


@dataclass(frozen=True)
class Fitted:
    """Weights from elsewhere, by the names of the model that they are for."""

    tensors: dict[str, Tensor]
    left_out: list[str]  # names that the model has with another number of classes
    classes: tuple[int, int] | None  # there and here, if they differ


def read_initial_weights(config: Config, model: nn.Module, record: Path) -> Plan:
    """The weights that `config.model.weights` names, for this model.

    An attempt that dies before the first checkpoint is followed by one that reads them again: `record` says whether
    they are still the same. Raises ConfigError when there are none, or they are another model's.
    """
    given = str(config.model.weights)
    if is_weights_name(given):
        found = pretrained_weights(config.model.name, given, config.model.args)
    else:
        try:
            found = read_source(Path(given))
        except ConfigError as error:
            raise ConfigError(f"model.weights={error}") from None
    fitted = fit(model.state_dict(), found, f"model.weights={given}")
    line = f"weights: {len(fitted.tensors)} of {len(fitted.tensors) + len(fitted.left_out)} tensors from {given}"
    if fitted.classes is not None:
        there, here = fitted.classes
        line += f"; {', '.join(fitted.left_out)} left as initialised (classes {there} -> {here})"
    return Plan({"model": fitted.tensors}, lines=[line, *note_source(record, given, weights_sha256(found))])


def fit(wanted: Mapping[str, Any], found: Mapping[str, Tensor], source: str) -> Fitted:
    """Match weights to the tensors of a model's state_dict, `wanted`, by name and shape.

    Names may have the prefixes of torch.compile and DistributedDataParallel. Tensors that differ only in the number of
    classes, their first dimension, are left out. Raises ConfigError, which names `source`, for any other difference.
    """
    names = {plain_name(name): name for name, value in wanted.items() if isinstance(value, Tensor)}
    given = {plain_name(name): tensor for name, tensor in found.items()}
    if not names.keys() & given.keys():
        given = {name.removeprefix("module."): tensor for name, tensor in given.items()}
    _check_names(names, given, source)
    for name in names.keys() & given.keys():
        if not _converts(given[name], wanted[names[name]]):
            kinds = f"{_kind(given[name])} there, {_kind(wanted[names[name]])} in this model"
            raise ConfigError(f"{source}: {name} is {kinds}; convert it")
    shared = {name: (tuple(given[name].shape), tuple(wanted[names[name]].shape)) for name in names if name in given}
    differing = {name: shapes for name, shapes in shared.items() if shapes[0] != shapes[1]}
    classes = {_classes(*shapes) for shapes in differing.values()}
    if None in classes or len(classes) > 1 or len(differing) == len(shared):
        name, (there, here) = next(iter(differing.items()))
        raise ConfigError(f"{source}: weights of another model: {name} is {there} there, {here} in this model")
    taken = {names[name]: given[name] for name in shared if name not in differing}
    return Fitted(taken, list(differing), next(iter(classes), None))


def _check_names(wanted: Mapping[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError unless the weights have the names of the model's tensors."""
    # Batch norm's count of batches, which old files lack, has no part in what a model computes.
    missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
    if missing:
        raise ConfigError(f"{source}: weights of another model: this model's {_are(missing)} not among them")
    if unknown := [name for name in given if name not in wanted]:
        raise ConfigError(f"{source}: weights of another model: {_are(unknown)} not in this model")


def _kind(tensor: Tensor) -> str:
    sparse = "" if tensor.layout is torch.strided else "sparse "
    return f"{sparse}{str(tensor.dtype).removeprefix('torch.')}"


def _classes(there: tuple[int, ...], here: tuple[int, ...]) -> tuple[int, int] | None:
    """The first dimensions of two shapes, if they differ in nothing else."""
    return (there[0], here[0]) if there and here and there[1:] == here[1:] else None


def _are(names: list[str]) -> str:
    """Some names as the subject of a sentence."""
    return f"{_few(names)} {'is' if len(names) == 1 else 'are'}"


def note_source(record: Path, source: str, sha256: str) -> Iterator[str]:
    """Record what the run starts from; yields a warning if an earlier attempt has started from something else."""
    now = {"source": source, "weights_sha256": sha256}
    try:
        before = json.loads(record.read_text())["weights_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        before = sha256
    with contextlib.suppress(OSError):
        record.write_text(json.dumps(now) + "\n")
    if before != sha256:
        yield f"WARNING: {source} has changed since this run first started from it; no step of that attempt is left"


def _fit_foreign(
    found: Foreign, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], source: str
) -> Plan:
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
        names, wanted = _targets(module)
        rename = renamed[name] = _renaming(wanted.keys(), found.weights[key].keys())
        there = {rename(plain_name(each)): tensor for each, tensor in found.weights[key].items()}
        fits = {each: there[each] for each in wanted.keys() & there.keys() if _fits(there[each], wanted[each])}
        if not fits:
            raise ConfigError(
                f"{KEY}={source}: weights of another model: none of its {len(there)} tensors fits {name} by name and "
                f"shape; it has {_few(there)}, {name} has {_few(wanted)}"
            )
        plan.weights[name] = {names[each]: fits[each] for each in wanted if each in fits}
        lacks = [each for each in wanted if each not in fits and not each.endswith("num_batches_tracked")]
        unused = [each for each in there if each not in fits]
        rest = f"; left as initialised: {_few(lacks)}" if lacks else ""
        rest += f"; not taken: {_few(unused)}" if unused else ""
        plan.lines.append(f"{name}: {len(fits)} of {counted(len(wanted), 'tensor')} from {source}{rest}")
    rename_any = next(iter(renamed.values()), plain_name) if len(renamed) == 1 else plain_name
    by_id = {id(each): key for module in modules.values() for key, each in module.named_parameters()}
    for name, optimizer in optimizers.items():
        key = _match(name, list(found.optimizers), len(optimizers))
        if key is None:
            has = ", ".join(found.optimizers) or "no optimiser"
            plan.lines.append(f"{name}: begins without state: the checkpoint has {has}")
            continue
        taken.add(key)
        state, why = _state(optimizer, found.optimizers[key], by_id, rename_any)
        of = len(parameters_of(optimizer))
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


def _targets(module: nn.Module) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The names in a module's state_dict of the tensors to fill, and these tensors, by their plain names."""
    state = {name: each for name, each in module.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    names = {plain_name(name): name for name in state}
    if all(name.startswith("module.") for name in names):
        names = {plain.removeprefix("module."): name for plain, name in names.items()}
    return names, {plain: state[name] for plain, name in names.items()}


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
    return there.shape == wanted.shape and _converts(there, wanted)


def _converts(there: Tensor, wanted: Tensor) -> bool:
    """Whether torch converts one tensor to the other's type without loss, unlike the integers of a quantised model."""
    return there.layout is torch.strided and there.dtype.is_floating_point >= wanted.dtype.is_floating_point


def _state(
    optimizer: Optimizer,
    found: OptimizerState,
    names: Mapping[int, str],
    rename: Callable[[str], str],
) -> tuple[dict[int, dict[str, Any]], str]:
    """The state by the numbers of this optimiser's parameters, and how it was matched or why there is none."""
    parameters = parameters_of(optimizer)
    if found.by_name:
        there = {rename(name): kept for name, kept in found.by_name.items()}
        own = {number: plain_name(names[id(p)]) for number, p in enumerate(parameters) if id(p) in names}
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


def fill(target: Tensor, whole: Tensor, group: Group) -> None:
    """Copy a full tensor into one that this rank may hold only rows of."""
    local_of(target).copy_(_rows_of(target, whole, group))


def _rows_of(target: Tensor, whole: Tensor, group: Group) -> Tensor:
    if shards := shard_count(target):
        return whole[slice(*shard_rows(len(whole), group.world.rank % shards, shards))]
    return whole


def _state_of(parameter: Tensor, own: Any, what: Any, group: Group) -> Any:
    """A value of an optimiser's state, laid out like its parameter. A collective."""
    whole = _received(own if isinstance(own, Tensor) else None, what, group)
    if not isinstance(whole, Tensor):
        return whole
    if whole.dim() == 0:
        return whole.cpu()  # where it belongs is for the optimiser to say
    if not is_distributed(parameter) or whole.shape != parameter.shape:
        return whole
    return sharded_like(parameter, _rows_of(parameter, whole, group).clone())


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{', '.join(listed[:SHOWN])}{more}" or "nothing"

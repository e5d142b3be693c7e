"""The weights that a run starts from. A resumed run has its own, and reads no others.

They come from model.weights, a file or a name (`read_initial_weights`), or from the model's own initialisation. Where a
model is sharded, only rank 0 holds all of it: the others `build` it without memory, and get their rows from rank 0.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laststep.checkpoint.export import plain_name, read_source, weights_sha256
from laststep.checkpoint.shards import local_of
from laststep.config.config import Config
from laststep.config.errors import ConfigError, first_line
from laststep.ranks.group import Group
from laststep.ranks.world import ShardPlace, shard_rows
from laststep.say import say
from laststep.tasks.models import is_weights_name, pretrained_weights

CPU, META = torch.device("cpu"), torch.device("meta")
SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Fitted:
    """Weights from elsewhere, by the names of the model that they are for."""

    tensors: dict[str, Tensor]
    left_out: list[str]  # names that the model has with another number of classes
    classes: tuple[int, int] | None  # there and here, if they differ


def read_initial_weights(config: Config, model: nn.Module, record: Path) -> tuple[Fitted, list[str]]:
    """The weights that `config.model.weights` names, for this model, and lines that say what was taken.

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
    return fitted, [line, *note_source(record, given, weights_sha256(found))]


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
        _check_kind(name, wanted[names[name]], given[name], source)
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
        raise ConfigError(f"{source}: weights of another model: this model's {_few(missing)} not among them")
    if unknown := [name for name in given if name not in wanted]:
        raise ConfigError(f"{source}: weights of another model: {_few(unknown)} not in this model")


def _check_kind(name: str, wanted: Tensor, given: Tensor, source: str) -> None:
    """Raise ConfigError for a tensor that torch would convert with loss, such as the integers of a quantised model."""
    loses = wanted.dtype.is_floating_point and not given.dtype.is_floating_point
    if given.layout is not torch.strided or loses:
        raise ConfigError(f"{source}: {name} is {_kind(given)} there, {_kind(wanted)} in this model; convert it")


def _kind(tensor: Tensor) -> str:
    sparse = "" if tensor.layout is torch.strided else "sparse "
    return f"{sparse}{str(tensor.dtype).removeprefix('torch.')}"


def _classes(there: tuple[int, ...], here: tuple[int, ...]) -> tuple[int, int] | None:
    """The first dimensions of two shapes, if they differ in nothing else."""
    return (there[0], here[0]) if there and here and there[1:] == here[1:] else None


def _few(names: list[str]) -> str:
    """The first of some names, as the subject of a sentence."""
    if len(names) > SHOWN:
        return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more are"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


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


Slot = tuple[nn.Module, str]  # a module, and the name of its parameter or buffer


class InitialValues:
    """The values of a model that has been built without memory: those with which rank 0 has built it, too."""

    def __init__(self, whole: nn.Module | None) -> None:
        """`whole` is the model with its values, on rank 0."""
        self._values = [] if whole is None else [tensor.detach() for tensor, _ in _slots([whole])]
        self._slots: list[tuple[Tensor, list[Slot]]] = []

    def note(self, models: Sequence[nn.Module]) -> None:
        """`models` are the one without memory and copies of it. Call this before any of them is changed."""
        self._slots = _slots(models)

    @torch.no_grad()
    def fill(self, models: Sequence[nn.Module], place: ShardPlace, group: Group) -> None:
        """Give the models, which have been sharded, memory on the group's device, and their values: tensor by tensor
        rank 0 sends the whole one, and each rank takes its rows. A collective."""
        made: dict[int, Tensor] = {}
        for shape, slots in self._slots:
            value = torch.empty_like(shape, device=group.collective_device, memory_format=torch.contiguous_format)
            if self._values:
                value.copy_(self._values.pop(0))
            if value.numel():
                group.broadcast([value.view(-1).view(torch.uint8)])
            for module, name in slots:
                before = getattr(module, name)
                if id(before) not in made:  # a tied parameter has several slots
                    made[id(before)] = _with_memory(before, group.device)
                    rows = local_of(made[id(before)])
                    if rows.shape == value.shape:
                        rows.copy_(value)
                    else:
                        begin, end = shard_rows(len(value), place.shard, place.shards)
                        rows.copy_(value[begin:end])
                setattr(module, name, made[id(before)])
        for model in models:
            model.load_state_dict({}, strict=False)  # has FSDP2 look where its shards are now


def build(
    make: Callable[[], nn.Module], reseed: Callable[[], None], rank: int
) -> tuple[nn.Module, InitialValues | None]:
    """The model on the meta device, with its initial values; or with memory, where that cannot be, which is said.

    Rank 0 builds it with memory first, and then all ranks without: a task may keep what it has built last.
    """
    whole = None
    if rank == 0:
        whole = make()
        reseed()
    try:
        with META, _NumbersOnCPU():
            model = make()
        if not all(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeError("it makes parameters on a device that it names itself")
        return model, InitialValues(whole)
    except Exception as error:  # what the model itself raises, it raises again below
        if rank == 0:
            why = first_line(error)
            say(f"WARNING: model() cannot be built shard by shard ({why}); each rank first builds it in host memory")
    reseed()
    return make(), None


def _slots(models: Sequence[nn.Module]) -> list[tuple[Tensor, list[Slot]]]:
    """The parameters and buffers of a model, each with the places where it and its copies stand."""
    found: dict[int, tuple[Tensor, list[Slot]]] = {}
    for alike in zip(*(model.modules() for model in models)):
        for name, tensor in (*alike[0].named_parameters(recurse=False), *alike[0].named_buffers(recurse=False)):
            found.setdefault(id(tensor), (tensor, []))[1].extend((module, name) for module in alike)
    return list(found.values())


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


class _NumbersOnCPU(TorchFunctionMode):
    """Tensors of given numbers keep them: models read these back as settings of their layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        empty = bool(args) and isinstance(args[0], list) and not args[0]  # torch asks so for the default device
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.linspace) and not empty:
            kwargs.setdefault("device", CPU)
        return func(*args, **kwargs)

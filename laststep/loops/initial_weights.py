"""model.weights: the weights that a run starts from. A resumed run has its own, and reads no others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laststep.checkpoint.export import plain_name, read_source, weights_sha256
from laststep.checkpoint.shards import local_of, shard_count
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.loops.buffers import bytes_of, is_dense
from laststep.loops.learner import Learner
from laststep.ranks.world import shard_rows
from laststep.tasks.models import is_weights_name, pretrained_weights

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
    return fitted, [line, *_note(record, given, weights_sha256(found))]


def start_from(learner: Learner, weights: Mapping[str, Tensor]) -> None:
    """Give the model rank 0's `weights`, by the names of its state_dict; what they lack stays as initialised.

    Rank 0 alone reads them, and broadcasts the result: a file that changes meanwhile cannot make ranks differ. A
    collective.
    """
    if learner.place.shards > 1:
        _take_rows(learner, weights)
    else:
        learner.model.load_state_dict(weights, strict=False)
        state = [tensor for tensor in learner.model.state_dict().values() if is_dense(tensor)]
        learner.group.broadcast([bytes_of(tensor) for tensor in state])
    learner.buffers.snapshot()
    if learner.average is not None:
        learner.average.module.load_state_dict(learner.model.state_dict())


def _take_rows(learner: Learner, weights: Mapping[str, Tensor]) -> None:
    """Give each rank its rows of rank 0's weights, one tensor at a time. A collective."""
    state, group, place = learner.model.state_dict(), learner.group, learner.place
    taken = torch.tensor([name in weights for name in state], dtype=torch.uint8, device=group.device)
    group.broadcast([taken])
    for (name, tensor), is_taken in zip(state.items(), taken.tolist()):
        if is_taken:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=group.device)
            if name in weights:
                whole.copy_(weights[name])
            group.broadcast([whole])
            if shard_count(tensor):
                whole = whole[slice(*shard_rows(len(whole), place.shard, place.shards))]
            local_of(tensor).copy_(whole)


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


def _note(record: Path, source: str, sha256: str) -> Iterator[str]:
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

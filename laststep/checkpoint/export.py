"""Reads weights from a run's checkpoints or from files."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laststep.checkpoint.export_files import INDEX, SAFETENSORS, TORCH, files_of
from laststep.checkpoint.store import (
    BY_LOSS,
    MANIFEST,
    OPAQUE,
    CheckpointError,
    CheckpointGone,
    CheckpointStore,
    Manifest,
    ranked,
)
from laststep.config.config import Config
from laststep.config.errors import ConfigError, first_line
from laststep.config.ranking import Ranking
from laststep.rundir import RunDir

READABLE = (SAFETENSORS, TORCH, ".pth", ".bin", ".ckpt")  # all but the first are what torch.save writes
NESTED = ("state_dict", "model")  # where training scripts keep the weights in what they save
TRIES = 5  # a run that is training may delete the checkpoint that is being read


@dataclass(frozen=True)
class Weights:
    """A model's weights, and the checkpoint that they are from."""

    # By the names of the plain model, on the CPU, in C order. A tensor with two names in the model is here twice.
    tensors: dict[str, Any]
    manifest: Manifest
    averaged: bool  # whether these are the moving average of train.ema_decay
    metrics: dict[str, float]  # of the run's validation of these weights; empty if it did not validate them


def read_run(run: RunDir, step: int | None = None, best: bool = False, raw: bool = False) -> Weights:
    """The weights in a run's newest checkpoint, in that of `step`, or in the best, see checkpoint.best_by.

    Every file is compared with its hash. A damaged checkpoint is refused, and none is taken in its place. Raises
    ConfigError.
    """
    return read_store(CheckpointStore(run.checkpoints), run.name, step, best, raw)


def read_store(store: CheckpointStore, name: str, step: int | None, best: bool, raw: bool) -> Weights:
    """`read_run`, for a folder of checkpoints. `name` is the run's, for messages."""
    for _ in range(TRIES):
        chosen = _choose(store, name, step, best)
        try:
            return _read(store, chosen, raw)
        except CheckpointGone:
            continue
        except CheckpointError as error:
            others = ", ".join(str(other) for other in store.steps() if other != chosen)
            fix = f"--step takes another one: {others}" if others else "there is no other"
            raise ConfigError(f"{name}: the checkpoint of step {chosen} is damaged ({error}); {fix}") from None
    raise ConfigError(f"{name}: its training deletes checkpoints faster than they can be read; try again")


def read_file(path: Path) -> dict[str, Any]:
    """The named tensors in a file, or in those of an index, on the CPU, by the names that they have there. Raises
    ConfigError.

    Of a file that torch.save wrote only the tensors are read: no code in it is run.
    """
    import safetensors
    import torch
    from safetensors.torch import load_file

    check_readable(path)
    if path.name.endswith(INDEX):
        return {name: tensor for file in files_of(path) for name, tensor in read_file(file).items()}
    try:
        if path.suffix == SAFETENSORS:
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles; one that cannot be read is refused below
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{path}: holds Python objects besides tensors, which are not loaded since that would run code; save "
            "model.state_dict() alone"
        ) from None
    except (EOFError, KeyError):
        raise ConfigError(f"{path}: cannot be read as weights: torch.save has not written this, or not whole") from None
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as weights: {first_line(error)}") from None
    for inner in (found, *(found.get(key) for key in NESTED if isinstance(found, dict))):
        if isinstance(inner, dict) and any(isinstance(value, torch.Tensor) for value in inner.values()):
            return {str(name): value for name, value in inner.items() if isinstance(value, torch.Tensor)}
    raise ConfigError(f"{path}: holds no named tensors; save model.state_dict()")


def read_source(source: Path, step: int | None = None, best: bool = False, raw: bool = False) -> dict[str, Any]:
    """The weights in a run's folder, in the folder of one checkpoint, or in a file. Raises ConfigError."""
    if (source / MANIFEST).is_file():
        number = source.name.removeprefix("step_")
        if not number.isdigit():
            raise ConfigError(f"{source}: the folder of a checkpoint is named like step_000001234")
        _refuse_choice(source, step, best)
        return read_store(CheckpointStore(source.parent), str(source.parent), int(number), False, raw).tensors
    if source.is_dir():
        return read_run(RunDir(source), step, best, raw).tensors
    if not source.exists():
        raise ConfigError(f"{source}: no such file or run")
    _refuse_choice(source, step, best)
    return read_file(source)


def check_readable(path: Path) -> None:
    """Raise ConfigError unless the file's name says that it holds weights."""
    if path.suffix not in READABLE and not path.name.endswith(INDEX):
        raise ConfigError(f"{path}: no such format; weights are in {', '.join(READABLE)} files, or in a run's folder")


def _choose(store: CheckpointStore, name: str, step: int | None, best: bool) -> int:
    """The step to read. Raises ConfigError."""
    steps = store.steps()
    kept = ", ".join(map(str, steps))
    if not steps:
        raise ConfigError(f"{name}: no checkpoint yet")
    if step is not None:
        if step not in steps:
            raise ConfigError(f"{name}: no checkpoint of step {step}; these are kept: {kept}")
        return step
    if not best:
        return steps[-1]
    manifests: dict[int, Manifest] = {}
    for each in steps:
        with contextlib.suppress(CheckpointError):
            manifests[each] = store.manifest(each)
    configs = [manifest.config for manifest in manifests.values() if manifest.config]  # the newest is last
    ranking = Ranking.parse(Config.parse(configs[-1]).checkpoint.best_by) if configs else BY_LOSS
    best_first = ranked(manifests, ranking)
    if not best_first:
        raise ConfigError(f"{name}: no checkpoint has a {ranking.metric}; name one by --step: {kept}")
    return best_first[0]


def _read(store: CheckpointStore, step: int, raw: bool) -> Weights:
    """Raises CheckpointError when the checkpoint is damaged, CheckpointGone when the run has deleted it, ConfigError
    when it holds no model."""
    from laststep.checkpoint.pack import load
    from laststep.checkpoint.weights import is_averaged, plain_weights

    with store.reading(step):
        manifest = store.verify(step)
        if manifest.opaque:
            raise ConfigError(
                f"{store.path(step) / OPAQUE}: the weights are in the format of the framework that run.checkpoint(...) "
                "called; export them with that"
            )
        has_average, tensors = load(store.path(step), manifest, lambda s: (is_averaged(s), plain_weights(s, raw)))
    if not tensors:
        raise ConfigError(f"{store.path(step)}: holds no model; register one with run.restore(model=...)")
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # A run that has an average validates that.
    measured = {} if has_average and raw else manifest.metrics
    metrics = {name: value for name, value in measured.items() if name.startswith("val_")}
    return Weights(plain, manifest, has_average and not raw, metrics)


def _refuse_choice(source: Path, step: int | None, best: bool) -> None:
    if step is not None or best:
        raise ConfigError(f"{source}: a step can be chosen of a run only, not of a file or of one checkpoint")

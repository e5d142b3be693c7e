"""The weights of a model: found in a run's checkpoints or in files, and written to files that other tools read.

`read_source` reads them from a run, from one checkpoint or from a file; `write` and `write_folder` write them.
`plain_weights` gives them the names of the plain model, and `weights_sha256` is their fingerprint.

Commands import this early: torch is imported only once weights are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.store import (
    BY_LOSS,
    MANIFEST,
    OPAQUE,
    CheckpointGone,
    CheckpointStore,
    Manifest,
    ranked,
)
from laststep.config.config import Config
from laststep.config.errors import ConfigError, first_line
from laststep.config.keep import Ranking
from laststep.records.metrics import VALIDATED
from laststep.rundir import RunDir, aside, fsync

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS, TORCH = ".safetensors", ".pt"
INDEX = ".safetensors.index.json"
DCP = "dcp"
# More is written as several files, which Hugging Face's tools read by their index. The limit is theirs, too.
FILE_BYTES = 5_000_000_000
READABLE = (SAFETENSORS, TORCH, ".pth", ".bin", ".ckpt")  # all but the first are what torch.save writes
NESTED = ("state_dict", "model")  # where training scripts keep the weights in what they save
INSIST_S = 60.0  # a run that is training may delete the checkpoint that is being read, again and again


@dataclass(frozen=True)
class Weights:
    """A model's weights, and the checkpoint that they are from."""

    # By the names of the plain model, on the CPU, in C order. A tensor with two names in the model is here twice.
    tensors: dict[str, Any]
    manifest: Manifest
    averaged: bool  # whether these are the moving average of train.ema_decay
    metrics: dict[str, float]  # of the run's validation of these weights; empty if it did not validate them
    task: Any = None  # the Task's own state, if it has one
    adapters: bool = False  # whether these are adapters alone, without the weights that they adapt
    left_out: int = 0  # tensors that the run does not train, and that were not asked for


def read_run(
    run: RunDir, step: int | None = None, best: bool = False, raw: bool = False, trained: bool = False
) -> Weights:
    """The weights in a run's newest checkpoint, in that of `step`, or in the best, see checkpoint.best_by. With
    `trained` not those that the run does not train.

    Every file is compared with its hash. A damaged checkpoint is refused, and none is taken in its place. Raises
    ConfigError.
    """
    return read_store(CheckpointStore(run.checkpoints), run.name, step, best, raw, trained)


def read_store(
    store: CheckpointStore, name: str, step: int | None, best: bool, raw: bool, trained: bool = False
) -> Weights:
    """`read_run`, for a folder of checkpoints. `name` is the run's, for messages."""
    begun = time.monotonic()
    while time.monotonic() - begun < INSIST_S:
        chosen = _choose(store, name, step, best)
        try:
            return _read(store, chosen, raw, trained)
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


def _read(store: CheckpointStore, step: int, raw: bool, trained: bool) -> Weights:
    """Raises CheckpointError when the checkpoint is damaged, CheckpointGone when the run has deleted it, ConfigError
    when it holds no model."""
    from laststep.checkpoint.pack import Layout, load

    with store.reading(step):
        manifest = store.verify(step)
        if manifest.opaque:
            raise ConfigError(
                f"{store.path(step) / OPAQUE}: the weights are in the format of the framework that run.checkpoint(...) "
                "called; export them with that"
            )

        def chosen(layout: Layout) -> Any:
            state = layout.structure
            named = plain_weights(state, raw)
            # The average of a fixed tensor is not fixed.
            fixed = {name for name, each in plain_weights(state, raw=True).items() if trained and layout.is_fixed(each)}
            taken = {name: each for name, each in named.items() if name not in fixed}
            return is_averaged(state), taken, of_task(state), has_base(state), len(named) - len(taken)

        has_average, tensors, task, adapters, left_out = load(store.path(step), manifest, chosen)
    if not tensors:
        raise ConfigError(f"{store.path(step)}: holds no model; register one with run.restore(model=...)")
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # A run that has an average validates that.
    measured = {} if has_average and raw else manifest.metrics
    metrics = {name: value for name, value in measured.items() if name.startswith(VALIDATED)}
    return Weights(plain, manifest, has_average and not raw, metrics, task, adapters, left_out)


def _refuse_choice(source: Path, step: int | None, best: bool) -> None:
    if step is not None or best:
        raise ConfigError(f"{source}: a step can be chosen of a run only, not of a file or of one checkpoint")


READY_MADE = {"model", "average", "optimizer", "scaler"}  # what the ready-made loop saves, see Learner.state_dict
# What laststep/frameworks/transformers.py registers, beside the models: the trained one, and perhaps a best and a
# reference model. The second stands for the frozen weights under adapters.
TRANSFORMERS, BASE = "transformers", "base"
AVERAGE_COUNT = "n_averaged"  # the one tensor in an AveragedModel's state_dict that belongs to no model


def weights_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's weights in a checkpoint's state. A custom training loop may have registered nothing as "model": then
    the tensors of everything that it has registered."""
    import torch

    if "model" in state:
        return dict(state["model"])
    parts = {name: part for name, part in state.items() if isinstance(part, dict)}
    return {
        f"{name}.{key}": t for name, part in parts.items() for key, t in part.items() if isinstance(t, torch.Tensor)
    }


def plain_weights(state: Mapping[str, Any], raw: bool = False) -> dict[str, Tensor]:
    """The weights of a run's model, by the names of the plain model, without those that wrappers add.

    The ready-made loop averages the weights where train.ema_decay is set: then the average, or with `raw` the weights
    themselves. Of a custom training loop: the module that it has registered, or, of several, all of them, each name
    after the module's. Empty when it has registered none. Of a model with adapters: these, by the names that PEFT
    gives them in a file.
    """
    if state.keys() >= READY_MADE:
        return _plain(state["average"] if is_averaged(state) and not raw else state["model"])
    if TRANSFORMERS in state and "model" in state:
        tensors = _plain(state["model"])
        names: dict[str, str] = json.loads(state[BASE]["exported"]) if has_base(state) else {}
        return {new: tensors[plain_name(old)] for old, new in names.items()} or tensors
    modules = {name: _plain(part) for name, part in state.items() if _is_of_a_module(part)}
    if len(modules) == 1:
        return modules.popitem()[1]
    return {f"{name}.{key}": tensor for name, weights in modules.items() for key, tensor in weights.items()}


def has_base(state: Mapping[str, Any]) -> bool:
    """Whether the model has adapters, and only these are in the checkpoint."""
    return TRANSFORMERS in state and BASE in state


def of_task(state: Mapping[str, Any]) -> Any:
    """The own state of the Task that the ready-made loop has saved; None if it has none."""
    return state.get("task") if state.keys() >= READY_MADE else None


def is_averaged(state: Mapping[str, Any]) -> bool:
    """Whether the ready-made loop has saved an average of the weights too."""
    return state.keys() >= READY_MADE and state["average"] is not None


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile adds, to the model or to parts of it."""
    return name.replace("_orig_mod.", "")


def _plain(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a module's state_dict; of an AveragedModel's, those of the average."""
    import torch

    if AVERAGE_COUNT in state:
        state = {name.removeprefix("module."): value for name, value in state.items() if name != AVERAGE_COUNT}
    return {plain_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _is_of_a_module(part: Any) -> bool:
    """Whether this looks like a module's state_dict: named tensors and nothing else. Those of optimisers and schedulers
    hold lists and numbers."""
    import torch

    if not isinstance(part, dict):
        return False
    values = [value for name, value in part.items() if not str(name).endswith("_extra_state")]
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the name, dtype, shape and bytes of each tensor, in name order: the same for any number of ranks."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_target(path: Path, folder: bool = False) -> None:
    """Raise ConfigError unless weights can be written to a file, or a folder, of this name."""
    if folder:
        if path.exists():
            raise ConfigError(f"{path}: exists already; name a new folder")
    elif path.suffix not in (SAFETENSORS, TORCH):
        raise ConfigError(f"{path}: the name must end in {SAFETENSORS} or {TORCH}; a folder needs --format {DCP}")
    elif path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Path]:
    """Write weights to a .safetensors or .pt file, and return the files written. Raises ConfigError.

    A file of that name is replaced in one step: at any moment it is the old one or the new one. No two of the tensors
    may share memory. Only .safetensors has room for `metadata`. Where one .safetensors file would be larger than
    FILE_BYTES, there are several, and an index, which is written last.
    """
    import torch
    from safetensors.torch import save_file

    check_target(path)
    if path.suffix == TORCH:
        with _replacing(path) as temporary:
            torch.save(dict(tensors), temporary)
        return [path]
    parts = _parts(tensors)
    index = path.with_name(path.stem + INDEX)
    names = [f"{path.stem}-{number:05d}-of-{len(parts):05d}{SAFETENSORS}" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [path.name]
    with contextlib.ExitStack() as files:  # all are in place at its end
        for name, part in zip(names, parts):
            save_file(part, files.enter_context(_replacing(path.with_name(name))), metadata=dict(metadata))
        index.unlink(missing_ok=True)  # of an earlier export
    if len(parts) == 1:
        return [path]
    total = sum(tensor.nbytes for tensor in tensors.values())
    places = {key: name for name, part in zip(names, parts) for key in part}
    with _replacing(index) as temporary:
        temporary.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n")
    path.unlink(missing_ok=True)  # of an earlier export; it would be preferred to the index
    return [index, *(path.with_name(name) for name in names)]


def write_folder(path: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Write weights to a new folder for torch.distributed.checkpoint, and return its files. Raises ConfigError."""
    from torch.distributed import checkpoint

    check_target(path, folder=True)
    temporary = aside(path.with_name(f".{path.name}"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process is alone
            checkpoint.save(dict(tensors), checkpoint_id=temporary, no_dist=True)
        temporary.rename(path)
        fsync(path.absolute().parent)
    except (OSError, RuntimeError, checkpoint.CheckpointException) as error:
        raise ConfigError(f"{path}: cannot be written: {first_line(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [file for file in path.iterdir() if file.is_file()]


def files_of(index: Path) -> list[Path]:
    """The files that an index names. Raises ConfigError."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: cannot be read as an index of weights: {first_line(error)}") from None
    if any(not isinstance(name, str) or os.path.basename(name) != name for name in names):
        raise ConfigError(f"{index}: names a file in another folder")
    return [index.with_name(name) for name in sorted(names)]


def _parts(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in their order, cut into as few parts as possible of at most FILE_BYTES. A larger one is alone."""
    parts: list[dict[str, Tensor]] = [{}]
    room = FILE_BYTES
    for name, tensor in tensors.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = FILE_BYTES
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file, which replaces the file `path` once it is written. Raises ConfigError."""
    import safetensors

    temporary = aside(path.with_name(f".{path.name}"))
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask has it; safetensors' own files can be read by nobody else
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be written: {first_line(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

"""Checkpoints that other tools have written: read as named weights and the state of optimisers.

* a file that torch.save has written, such as Lightning's .ckpt or a script's own dictionary; a .safetensors file
* a folder of torch.distributed.checkpoint, which has a file .metadata
* a folder that transformers' Trainer has written, with the model's files and optimizer.pt

No code in them is run: only tensors, numbers, text and containers are read. Commands import this early: torch is
imported only once something is read.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laststep.checkpoint.export import INDEX, READABLE, SAFETENSORS, read_file
from laststep.config.errors import ConfigError, first_line

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
# The model's files in a folder of transformers, the likelier first; a model with adapters has these alone.
OF_TRANSFORMERS = (
    *("model.safetensors", f"model{INDEX}", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("adapter_model.safetensors", "adapter_model.bin"),
)
OPTIMIZER = "optimizer.pt"
# All that torch's .metadata is made of, besides dtypes and the classes of METADATA_MODULE.
METADATA_MODULE = "torch.distributed.checkpoint.metadata"
SAFE = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device", "strided"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple", "int", "float", "str", "bytes"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}
DEPTH = 3  # of dictionaries in which models and optimisers are looked for


@dataclass
class OptimizerState:
    """The state of one optimiser: by the names of the parameters, or in groups by their numbers."""

    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)


@dataclass
class Foreign:
    """What a checkpoint of another tool holds. A model or an optimiser that stands alone has the name of its key."""

    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # the names of what is neither


def kind_of(path: Path) -> str | None:
    """What a path seems to hold, for messages; None if it is nothing that `read` reads."""
    if (path / METADATA).is_file():
        return "a folder of torch.distributed.checkpoint"
    if any((path / name).is_file() for name in OF_TRANSFORMERS):
        return "a folder of transformers"
    if path.is_file() and (path.suffix in READABLE or path.name.endswith(INDEX)):
        return "a file"
    return None


def read(path: Path) -> Foreign:
    """What this checkpoint holds, on the CPU. Raises ConfigError."""
    found = Foreign()
    if (path / METADATA).is_file():
        _sort(_read_folder(path), found)
    elif path.is_dir():
        name = next((name for name in OF_TRANSFORMERS if (path / name).is_file()), None)
        if name is None:
            raise ConfigError(f"{path}: no checkpoint of another tool that can be read")
        found.weights["model"] = read_file(path / name) if name.endswith((SAFETENSORS, INDEX)) else _bins(path / name)
        if (path / OPTIMIZER).is_file():
            _sort({"optimizer": _load(path / OPTIMIZER)}, found)
        beside = ("scheduler.pt", "rng_state.pth", "scaler.pt")
        found.left += [each for each in beside if (path / each).is_file()]
    elif path.suffix == SAFETENSORS or path.name.endswith(INDEX):
        found.weights["model"] = read_file(path)
    else:
        _sort(_load(path), found)
    if not found.weights and not found.optimizers:
        raise ConfigError(f"{path}: holds neither named weights nor the state of an optimiser")
    return found


def _bins(path: Path) -> dict[str, Tensor]:
    """The weights in a .bin file, or in those of an index."""
    import json

    if path.suffix == ".json":
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        return {name: each for file in names for name, each in read_file(path.with_name(Path(file).name)).items()}
    return read_file(path)


def _load(path: Path) -> Any:
    """What torch.save has written. Raises ConfigError."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"an object of {named[1]}" if named else "Python objects"
        raise ConfigError(
            f"{path}: holds {what} besides tensors, which is not loaded since that would run code; save the "
            "state_dict()s of the model and the optimiser alone"
        ) from None
    except (OSError, EOFError, KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a checkpoint: {first_line(error)}") from None


def _is_zip(path: Path) -> bool:
    """Whether a file has torch's newer format, which can be mapped into memory."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


class _Metadata(pickle.Unpickler):
    """Reads .metadata, and no class that torch would not have written."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 has its classes
        known = "." not in name and name in SAFE.get(module, ())
        known |= module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." not in name and module == METADATA_MODULE:
            found = super().find_class(module, name)
            known = isinstance(found, type) and found.__module__ == module
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _read_folder(path: Path) -> dict[str, Any]:
    """What a folder of torch.distributed.checkpoint holds, nested as it was saved. Raises ConfigError."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    class Reader(checkpoint.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *words: Any, **named: Any) -> Metadata:
            metadata: Metadata = _Metadata(io.BytesIO((path / METADATA).read_bytes())).load()
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = checkpoint.StorageMeta() if hasattr(checkpoint, "StorageMeta") else None
            return metadata

    class Planner(checkpoint.DefaultLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
                except pickle.UnpicklingError:  # a value that is no tensor and no number is not looked at
                    self.state_dict[read_item.dest_index.fqn] = None

    try:
        reader = Reader(path)
        metadata = reader.read_metadata()
        flat: dict[str, Any] = {}
        for name, each in metadata.state_dict_metadata.items():
            is_tensor = isinstance(each, TensorStorageMetadata)
            flat[name] = torch.empty(each.size, dtype=each.properties.dtype) if is_tensor else "bytes"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process is alone
            planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
            checkpoint.load(flat, storage_reader=reader, planner=planner, no_dist=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path}: its .metadata is not torch's alone ({error}); it is not loaded") from None
    except Exception as error:  # torch wraps what it meets
        raise ConfigError(f"{path}: cannot be read by torch.distributed.checkpoint: {first_line(error)}") from None
    places = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = places.get(name, (name,))
        into = nested
        for key in above:
            into = into.setdefault(key, {})
        into[last] = value
    return nested


def _sort(found: Any, into: Foreign, name: str = "", depth: int = DEPTH) -> None:
    """Find models and optimisers in a nested dictionary."""
    if not isinstance(found, dict):
        into.left.append(name or f"a {type(found).__name__}")
        return
    if (state := _optimizer(found)) is not None:
        into.optimizers[name] = state
        return
    tensors = {str(key): value for key, value in found.items() if _is_tensor(value)}
    of_optimizers = name.startswith("optim")
    if any(each.dim() for each in tensors.values()) and not of_optimizers:  # otherwise counters
        into.weights[name or "model"] = tensors
    for key, value in found.items():
        below = list(value) if isinstance(value, (list, tuple)) else []
        if _is_tensor(value):
            continue
        if below and all(isinstance(each, dict) and _optimizer(each) is not None for each in below):
            for number, each in enumerate(below):  # Lightning's optimizer_states
                _sort(each, into, str(key) if len(below) == 1 else f"{key}.{number}")
        elif isinstance(value, dict) and depth and value and not (of_optimizers and _optimizer(value) is None):
            _sort(value, into, str(key), depth - 1)
        else:
            into.left.append(str(key))


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _optimizer(found: Mapping[Any, Any]) -> OptimizerState | None:
    """The state of an optimiser, if this is one: as `Optimizer.state_dict` returns it; by names, as
    torch.distributed.checkpoint.state_dict does; or with the names flattened."""
    flat = {str(key)[6:]: value for key, value in found.items() if str(key).startswith("state.")}
    if flat and any(str(key).startswith("param_groups.") for key in found):
        by_name: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            parameter, _, what = key.rpartition(".")
            by_name.setdefault(parameter, {})[what] = value
        return OptimizerState(by_name)
    state, groups = found.get("state"), found.get("param_groups")
    if isinstance(groups, dict):  # a list, taken apart by torch.distributed.checkpoint
        groups = [groups[key] for key in sorted(groups, key=str)]
    if not isinstance(state, dict) or not isinstance(groups, (list, type(None))):
        return None
    if groups is None and not (state and all(isinstance(each, dict) for each in state.values())):
        return None
    if any(not isinstance(key, int) and not str(key).isdigit() for key in state):
        return OptimizerState({str(key): dict(value) for key, value in state.items() if isinstance(value, dict)})
    states = {int(key): dict(value) for key, value in state.items() if isinstance(value, dict)}
    names = dict(_names(groups or []))
    if names:
        return OptimizerState({names[number]: each for number, each in states.items() if number in names})
    numbers = [list(group.get("params", ())) for group in groups or [] if isinstance(group, dict)]
    return OptimizerState(groups=[[states.get(number, {}) for number in each] for each in numbers])


def _names(groups: list[Any]) -> Iterator[tuple[int, str]]:
    """The names that an optimiser knows its parameters by, if it was made with `named_parameters()`."""
    for group in groups:
        if isinstance(group, dict) and isinstance(group.get("param_names"), (list, tuple)):
            yield from zip(group.get("params", ()), map(str, group["param_names"]))

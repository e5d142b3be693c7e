"""Writes weights to files that other tools read: one file, several with an index, or a folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.checkpoint.store import fsync
from laststep.config.errors import ConfigError, first_line
from laststep.rundir import aside

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS, TORCH = ".safetensors", ".pt"
INDEX = ".safetensors.index.json"
DCP = "dcp"
# More is written as several files, which Hugging Face's tools read by their index. The limit is theirs, too.
FILE_BYTES = 5_000_000_000


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

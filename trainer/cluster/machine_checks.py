"""Checks before a start or a submission: refuse what this machine already knows will fail. Imports no torch."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from trainer.config.config import Config
from trainer.config.errors import ConfigError, nearest
from trainer.config.schema import Data
from trainer.data.catalog import DATA_ARGS, DATASETS, FLAGS
from trainer.tasks.models import check_model_name
from trainer.world.slurm import SlurmError, check_conf

WITHOUT_SLURM = "add --local to train here, or try a throwaway Slurm with `make slurm`"


def check_names(config: Config) -> None:
    """Check that the task exists; for the ready-made one, the model and the data set too. Raises ConfigError."""
    if config.task != "classification":
        return _check_task(config.task)
    check_model_name(config.model.name)
    data = config.data
    if data.name not in DATASETS:
        raise ConfigError(f"data.name={data.name}: no such data set; {nearest(data.name, list(DATASETS))}")
    known = DATA_ARGS[data.name]
    for name, value in data.args.items():
        if name not in known:
            raise ConfigError(f"data.args.{name}: {data.name} has no such option; {nearest(name, sorted(known))}")
        if name in FLAGS and not isinstance(value, bool):
            raise ConfigError(f"data.args.{name}={value}: must be true or false")
        if name not in FLAGS and (not isinstance(value, int) or not 0 < value < 2**63):
            raise ConfigError(f"data.args.{name}={value}: must be a positive integer of up to 64 bits")
    if data.args.get("cache") and data.args.get("decode_on_device"):
        raise ConfigError(
            "data.args.decode_on_device=true: data.args.cache keeps images off the device; leave one of them out"
        )
    _check_data_root(data)


def check_slurm() -> None:
    """Check that Slurm's commands are installed here and find their configuration. Raises ConfigError."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise ConfigError(f"no Slurm on this machine (sbatch not found): {WITHOUT_SLURM}")
    try:
        check_conf()
    except SlurmError as error:
        raise ConfigError(str(error)) from None


def check_local(config: Config) -> None:
    """Check that this machine has the GPUs that a local run asks for. Raises ConfigError."""
    wanted, here = config.launch.gpus_per_node, count_gpus()
    if wanted > here:
        fix = f"use --gpus-per-node {here}" if here else "leave it out to train on the CPU"
        raise ConfigError(f"launch.gpus_per_node={wanted}: this machine has {here} GPUs; {fix}")
    if config.device == "cuda" and not here:
        raise ConfigError("device=cuda: this machine has no GPU; use device=cpu or device=auto")


def check_submission(config: Config) -> None:
    """Check that a job that needs GPUs asks for some. Raises ConfigError."""
    asks_for_gpus = config.launch.gpus_per_node or any("gpu" in f"{k} {v}" for k, v in config.launch.slurm.items())
    if config.device == "cuda" and not asks_for_gpus:
        raise ConfigError("device=cuda: the job asks for no GPU; add --gpus-per-node N")


def check_writable(root: Path) -> None:
    """Check that the folder of all runs exists or can be created, and is writable. Raises ConfigError."""
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"launch.root={root}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"launch.root={root}: {existing} is not writable; name another with launch.root=FOLDER")


def check_run_writable(folder: Path) -> None:
    """Check that a run may continue in its folder. Raises ConfigError."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder.name}: you may not write to {folder}, so this run cannot continue there")


def count_gpus() -> int:
    """The number of NVIDIA GPUs that a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def _check_data_root(data: Data) -> None:
    root = Path(data.root)
    if data.name in ("mnist-5k", "fake"):
        return
    if root.exists() and not root.is_dir():
        raise ConfigError(f"data.root={root}: is not a folder")
    if data.name == "imagefolder":
        for part in ("train", "val"):
            folder = root / part
            if not folder.is_dir():
                raise ConfigError(
                    f"data.root={root}: {folder} is missing; imagefolder reads train/CLASS/*.jpg and val/CLASS/*.jpg"
                )
            if not any(entry.is_dir() for entry in folder.iterdir()):
                raise ConfigError(f"data.root={root}: {folder} is empty; it must hold one folder of images per class")


def _check_task(path: str) -> None:
    """Check that the module of a user's Task or function exists and defines it.

    The module is parsed, not imported, because it may import torch. Raises ConfigError.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"task={path}: {nearest(path, ['classification'])} or give package.module.Name")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    except Exception as error:  # to find a.b.C, Python runs a/__init__.py, which may raise anything
        raise ConfigError(f"task={path}: {module} cannot be imported: {type(error).__name__}: {error}") from None
    if spec is None:
        raise ConfigError(f"task={path}: no module {module} on the Python path ({sys.path[0] or os.getcwd()}, ...)")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # a package without source, or a compiled module: the rank finds out
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"task={path}: {spec.origin}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"task={path}: {spec.origin} cannot be read: {error}") from None
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            assigned = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names.update(assigned)
            if name in assigned and isinstance(node.value, ast.Constant):
                raise ConfigError(f"task={path}: is neither a subclass of trainer.Task nor a function")
        if isinstance(node, ast.FunctionDef) and node.name == name and not _takes_one(node):
            raise ConfigError(f"task={path}: must take one argument, the run: def {name}(run)")
    if name not in names and "*" not in names:
        raise ConfigError(f"task={path}: {module} has no {name}; {nearest(name, sorted(names))}")


def _takes_one(function: ast.FunctionDef) -> bool:
    """Whether a function can be called with one argument. A decorated one passes: the decorator may change that."""
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    takes_any = positional >= 1 or arguments.vararg is not None
    needs_more = positional - len(arguments.defaults) > 1 or None in arguments.kw_defaults
    return (takes_any and not needs_more) or bool(function.decorator_list)

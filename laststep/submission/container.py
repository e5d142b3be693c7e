"""launch.container: the ranks of a job in an image, by Apptainer, Singularity or Pyxis.

Only the ranks run in it: the batch shell stays outside, where Slurm's commands are. The image sees the folder of all
runs, the folder where the command was typed, the data and the script, at the paths that they have outside. Each
variable that the configuration or launch.setup sets reaches the inside, also where the image sets it too, or where
nothing of the environment is passed on (`--cleanenv`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine
from laststep.ranks import slurm
from laststep.rundir import RunDir
from laststep.runs.run_folders import folder_of, working_folder

SQUASH = ".sqsh"  # Enroot's images, which Pyxis starts
# In a job's shell and its ranks: the names of the variables that must reach the inside.
INSIDE = "LASTSTEP_INSIDE"
PYTHON = "python3"
# What srun sets for each rank.
BY_SRUN = "SLURM*|SUBMITIT_*|LASTSTEP_*|PMI*|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
# What a `module load` outside changes: an image has its own.
OUTSIDE = "PATH|LD_*|MANPATH|PWD|OLDPWD|SHLVL|_|LOADEDMODULES|_LMFILES_|BASH_FUNC_*"


def check(config: Config, machine: Machine) -> None:
    """Refuse an image that the ranks could not be started in. Raises ConfigError."""
    image = config.launch.container
    if image is None:
        return
    given = f"launch.container={image}"
    if machine.is_here:
        raise ConfigError(f"{given}: --local and --debug train without an image; add launch.container=null")
    if "://" in image or ("#" in image and not os.path.exists(image)):
        source = image if "://" in image else f"docker://{image}"
        raise ConfigError(
            f"{given}: compute nodes may have no internet, and a name may mean another image tomorrow; pull it once, "
            f"`apptainer pull image.sif {shlex.quote(source)}` or `enroot import {shlex.quote(source)}`"
        )
    if not os.path.exists(path := os.path.abspath(os.path.expanduser(image))):
        raise ConfigError(f"{given}: there is no {path}")
    if machine.submits:
        runtime(image)
    for folder in mounts(config, folder_of(config)):
        if set(",:") & set(str(folder)):
            raise ConfigError(f"{given}: {folder} cannot be mounted: its path has a comma or a colon")


def with_absolute_image(config: Config) -> Config:
    """The configuration with the image's whole path, as the job may start in another folder."""
    if config.launch.container is None:
        return config
    path = os.path.abspath(os.path.expanduser(config.launch.container))
    return with_launch(config, container=path)


def runtime(image: str) -> str:
    """The program that starts this image here. Raises ConfigError where there is none."""
    if image.endswith(SQUASH):
        if not has_pyxis():
            raise ConfigError(f"launch.container={image}: srun has no --container-image: no Pyxis in this Slurm")
        return "pyxis"
    found = next(filter(shutil.which, ("apptainer", "singularity")), None)
    if found is None:
        raise ConfigError(
            f"launch.container={image}: no Apptainer and no Singularity on this machine; load its module before you "
            "type this, or see what `doctor` says"
        )
    return found


def has_pyxis() -> bool:
    """Whether this machine's srun has Pyxis's options."""
    try:
        shown = slurm.run(["srun", "--help"], timeout_s=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "--container-image" in shown.stdout


def mounts(config: Config, run: RunDir) -> list[Path]:
    """The folders that the ranks need, none of them within another."""
    folders = [Path(config.launch.root), run.code.resolve().parent, working_folder(run)]
    # A value that is no path, such as a run's name for model.weights, names no file here.
    for text in filter(None, (config.data.root, config.model.weights, *config.script[:1])):
        path = Path(os.path.expanduser(text)).absolute()
        if path.exists():
            folders.append(path if path.is_dir() else path.parent)
    both = dict.fromkeys([*folders, *(folder.resolve() for folder in folders)])
    return [one for one in both if not any(one != other and one.is_relative_to(other) for other in both)]


def python(config: Config, run: RunDir) -> str:
    """Shell words that start Python in the image, in each rank."""
    launch = config.launch
    inner = launch.python or PYTHON
    if launch.container is None or launch.container.endswith(SQUASH):
        return inner
    program = _runtime_or_any(launch.container)
    prefix = f"{program.upper()}ENV_"
    binds = ",".join(map(str, mounts(config, run)))
    lines = [
        f'for name in $(compgen -e); do case " ${INSIDE} " in *" $name "*) ;; *)',
        f"    case $name in {BY_SRUN}) ;; *) continue;; esac;;",
        f'esac; export "{prefix}$name=${{!name}}"; done',
        "gpu=; [ ! -e /proc/driver/nvidia/version ] || gpu=--nv; [ ! -e /dev/kfd ] || gpu=--rocm",
        f"exec {program} exec $gpu --bind {shlex.quote(binds)} --pwd {shlex.quote(str(run.code))}"
        f' {shlex.quote(launch.container)} {inner} "$@"',
    ]
    return f"bash -c {shlex.quote(chr(10).join(lines))} {program}"


def srun_args(config: Config, run: RunDir) -> list[str]:
    """Pyxis's options of srun."""
    image = config.launch.container
    if image is None or not image.endswith(SQUASH):
        return []
    binds = ",".join(f"{folder}:{folder}" for folder in mounts(config, run))
    return [f"--container-image={image}", f"--container-mounts={binds}", f"--container-workdir={run.code}"]


def before_setup(config: Config) -> list[str]:
    """Lines of the batch shell, before anything is exported there."""
    if config.launch.container is None:
        return []
    return ["declare -A outside; for name in $(compgen -e); do outside[$name]=${!name}; done"]


def after_setup(config: Config, named: Iterable[str]) -> list[str]:
    """Lines behind the user's setup: the names of all variables that have been set since `before_setup`, of which the
    `named` ones may have had the same value before."""
    if config.launch.container is None:
        return []
    return [
        f"export {INSIDE}={shlex.quote(' '.join(named))}",
        "for name in $(compgen -e); do",
        f"    case $name in {OUTSIDE}) continue;; esac",
        f'    [ "${{outside[$name]-unset}}" = "${{!name}}" ] || {INSIDE}+=" $name"',
        "done",
        *([f"inside=--container-env=${{{INSIDE}// /,}}"] if config.launch.container.endswith(SQUASH) else []),
    ]


def _runtime_or_any(image: str) -> str:
    """To show a script on a machine that has neither."""
    try:
        return runtime(image)
    except ConfigError:
        return "apptainer"

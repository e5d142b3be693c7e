"""Making and finding run folders."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cluster.machine_checks import check_writable
from trainer.config.config import Config
from trainer.config.errors import ConfigError, nearest
from trainer.rundir import RunDir

PROJECT = Path(__file__).resolve().parent.parent.parent


def with_name(config: Config, stem: str) -> Config:
    """The configuration with a name for its run, as `with_root`. Raises ConfigError when the name given is taken."""
    named = with_root(config, stem)
    if RunDir(Path(named.launch.root) / str(named.launch.name)).path.exists():
        name = named.launch.name
        raise ConfigError(
            f"launch.name={name}: this run exists; go on with `python launch.py resume {name}`, or choose another name"
        )
    return named


def with_root(config: Config, stem: str) -> Config:
    """The configuration with an absolute root, as the job may start in another folder, and with a name, made from
    `stem` and the time where none is given."""
    root = Path(config.launch.root).expanduser().absolute()
    name = config.launch.name
    if name is None:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:150] or "run"  # a file may be called anything
        name = base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while (root / name).exists():
            number += 1
            name = f"{base}-{number}"
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, root=str(root), name=name))


def create(config: Config) -> RunDir:
    """Make the run's folder and put its configuration there. Raises ConfigError when that cannot be."""
    assert config.launch.name is not None
    root = Path(config.launch.root)
    check_writable(root)
    run = RunDir(root / config.launch.name)
    try:
        run.path.mkdir(parents=True)
        run.logs.mkdir()
        config.save(run.config)
    except FileExistsError:
        raise ConfigError(f"launch.name={run.name}: this run was started a moment ago by someone else") from None
    except OSError as error:
        raise ConfigError(f"launch.root={root}: cannot be written: {error.strerror}") from None
    return run


def load(run: RunDir, overrides: Sequence[str] = ()) -> Config:
    """The run's configuration, with its folder where it is now: it may have been moved. Raises ConfigError."""
    config = Config.load(run.config, overrides)
    launch = dataclasses.replace(config.launch, root=str(run.path.parent), name=run.name)
    return dataclasses.replace(config, launch=launch)


def remove(run: RunDir) -> None:
    """Take back a folder that was made for a run that did not start."""
    shutil.rmtree(run.path, ignore_errors=True)


def note_submission(run: RunDir, job_id: str, **more: Any) -> None:
    """Remember the job, and where and how it was started."""
    record = {"job_id": job_id, "time": time.time(), "host": socket.gethostname(), "command": sys.argv, **more}
    with run.submissions.open("a") as file:
        file.write(json.dumps(record) + "\n")


def python_path(code: Path = PROJECT) -> str:
    """PYTHONPATH of the ranks: this project's code or the copy of it, the folder that the command was typed in where
    that is not copied, and the user's own."""
    here = Path.cwd()
    if here.is_relative_to(PROJECT):
        here = code / here.relative_to(PROJECT)
    places = [code, here] if code == PROJECT or here.is_relative_to(code) else [code]
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([*map(str, places), *own]))


def site() -> str | None:
    """The site whose profile in configs/site/ applies where the command names none."""
    return os.environ.get("LASTSTEP_SITE") or None


def root_of(overrides: Sequence[str]) -> str:
    """The folder of all runs: launch.root among the words, or the site's, or the default."""
    return Config.load(None, overrides, site()).launch.root


def find(name: str, root: str) -> RunDir:
    """The run of that name in `root`, or in the folder that `name` is a path of. Raises ConfigError."""
    for path in (Path(root).expanduser() / name, Path(name).expanduser()):
        run = RunDir(path)
        if os.path.isfile(run.config):  # unlike Path.is_file, False where the folder may not be read
            return run
        if os.path.isdir(run.path) and not os.access(run.path, os.R_OK | os.X_OK):
            raise ConfigError(f"{name}: {run.path} may not be read by you; ask {run.path.owner()}")
    folder = Path(root).expanduser()
    names = sorted(path.parent.name for path in folder.glob("*/config.yaml")) if os.path.isdir(folder) else []
    raise ConfigError(f"{name}: no such run in {folder}/; {nearest(name, names) if names else 'there is none yet'}")


def in_root(root: str) -> list[RunDir]:
    """All runs in that folder, the youngest last."""
    folder = Path(root).expanduser()
    born = {path: path.stat().st_mtime for path in folder.glob("*/config.yaml")} if os.path.isdir(folder) else {}
    return [RunDir(path.parent) for path in sorted(born, key=lambda path: (born[path], path))]

"""`python -m laststep`: one rank of a run, under any launcher."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from laststep.attempt import user_error
from laststep.attempt.predecessor import finish_of
from laststep.checkpoint.files import Patience
from laststep.checkpoint.store import START_S
from laststep.cli import hello
from laststep.cli.parsers import Parser, add_config, split
from laststep.config.config import Config, find_config
from laststep.config.errors import ConfigError, nearest
from laststep.config.keys import fields_of
from laststep.config.machine import Machine, Way
from laststep.ranks.launchers import detect_world
from laststep.ranks.process import die_with_parent
from laststep.ranks.world import World
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.runs.run_folders import only_owner_writes
from laststep.say import command, say
from laststep.submission import submission
from laststep.submission.local import spawn
from laststep.trainer import Trainer

EPILOG = """\
Start it under any launcher; each process finds out which rank it is:
  python -m laststep --name first                one process
  python -m laststep --spawn 4 --name first      four processes on this machine
  torchrun --nproc-per-node 4 -m laststep --name first
  srun python -m laststep --name first           in an sbatch script or salloc
  mpirun python -m laststep --name first         Open MPI
To continue a run, repeat the command with the same name. Without --name, the
name is made from the configuration's name and the job id.
`python -m laststep hello` tests in seconds whether the ranks find each other.

Any key=value sets a configuration key; `{command} --dry-run` prints them all.
launch.nodes and its like are for launch.py only: here the launcher decides how
many ranks there are.
"""


def main(words: Sequence[str]) -> int:
    """Train in this process; returns the exit status, unless a stop's SystemExit carries it. Raises ConfigError."""
    if words[:1] == ["hello"]:
        return hello.main(words[1:])
    parser = Parser(
        "python -m laststep", "One rank of a run, under any launcher.", EPILOG.replace("{command}", command())
    )
    add_config(parser)
    parser.add_argument("--name", metavar="RUN", help="name of the run; an existing one is continued (launch.name)")
    parser.add_argument("--spawn", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument(
        "words", nargs="*", metavar="key=value|FOLDER", help="set a configuration key, or continue a run"
    )
    args = parser.parse_intermixed_args(words)
    folders, overrides = split(args.words)
    with only_owner_writes():
        return _main(args, folders, overrides)


def _main(args: argparse.Namespace, folders: Sequence[str], overrides: list[str]) -> int:
    """What the options ask for: continue a run, start one rank, or several."""
    if folders:
        return _continue(Path(folders[0]), overrides)
    if args.name is not None:
        overrides.append(f"launch.name={args.name}")
    if args.spawn is None:
        return _train(args.config, overrides, args.site)
    config = run_folders.with_root_and_name(_load(args.config, overrides, args.site), find_config(args.config).stem)
    overrides.append(f"launch.name={config.launch.name}")
    return spawn(args.spawn, functools.partial(_train, args.config, overrides, args.site))


def _train(source: str, overrides: Sequence[str], site: str | None) -> int:
    """Start the run, or continue it, in this rank."""
    world = detect_world()
    config = _load(source, overrides, site)
    stem = find_config(source).stem
    if config.launch.name is None and world.launcher != "python":
        # All ranks, and the same job after a requeue, arrive at this name.
        named = dataclasses.replace(config.launch, name=f"{stem}-{world.job_id}")
        config = dataclasses.replace(config, launch=named)
    config = submission.ready(config, Machine(Way.RANK, new=False, words=overrides, source=source), stem)
    run = RunDir(Path(config.launch.root) / str(config.launch.name))
    new = not run.config.exists()
    if new and world.rank == 0:
        run_folders.create(config)
    elif not new:
        started = _load_started(run, world)
        config = run_config.with_former_defaults(config, started, overrides)
        _check_same(config, started)
    try:
        return _rank(config, run, world)
    except ConfigError:
        if new and world.rank == 0 and not run.checkpoints.exists():
            run_folders.remove(run)
        raise


def _continue(folder: Path, overrides: Sequence[str]) -> int:
    """Continue the run in that folder, in this rank."""
    patience = Patience(START_S, say)
    if not patience.insist(lambda: _exists(folder)):
        runs = [str(path.parent) for path in folder.parent.glob("*/config.yaml")]
        raise ConfigError(f"{folder}: no such folder of a run; {nearest(str(folder), ['hello', *sorted(runs)])}")
    if overrides:
        raise ConfigError(f"{overrides[0]}: a continued run keeps its configuration")
    world, run = detect_world(), RunDir(folder)
    if not patience.insist(lambda: _exists(run.config)):
        run = run_folders.find_run(str(folder), str(folder.parent))
    return _rank(_load_started(run, world), run, world)


def _exists(path: Path) -> bool:
    """Whether there is something at a path. Raises OSError where that cannot be seen right now."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _rank(config: Config, run: RunDir, world: World) -> int:
    if world.launcher in ("submitit-local", "ray"):
        die_with_parent(signal.SIGTERM)  # a killed launcher must not leave its ranks training unseen
    if world.launcher != "submitit-local" and world.rank == 0:
        patience = Patience(START_S, say)
        if patience.insist(lambda: finish_of(run, config)) is None:
            name = {"job_name": os.environ["SLURM_JOB_NAME"]} if "SLURM_JOB_NAME" in os.environ else {}
            patience.insist(lambda: run_folders.record_submission(run, world.job_id, **name))
    user_error.main_is_ours = True
    Trainer(config)()
    return 0


def _load_started(run: RunDir, world: World) -> Config:
    """The configuration of a run that exists. All ranks read it; rank 0 reports what is unusual, and restores it."""
    patience = Patience(START_S, say)
    if world.rank:
        return patience.insist(lambda: run_config.load(run, warn=lambda _: None))
    return patience.insist(lambda: run_config.load(run, warn=lambda text: say(f"WARNING: {text}"), restore=True))


def _load(source: str, overrides: Sequence[str], site: str | None) -> Config:
    return Config.load(source, overrides, site or run_folders.site())


def _check_same(config: Config, started: Config) -> None:
    """Raise ConfigError when the run was started with other values: it would be neither that run nor this one."""
    # The folder of the data may be recorded as an absolute path, see `run_folders.with_absolute_data`.
    before = {key: value for key, _, value in fields_of(run_folders.with_absolute_data(started))}
    for key, _, value in fields_of(run_folders.with_absolute_data(config)):
        if value != before[key] and not key.startswith("launch."):
            raise ConfigError(
                f"{key}={value}: {config.launch.name} was started with {before[key]}, and a run keeps its "
                "values; leave this one out, or choose another --name"
            )

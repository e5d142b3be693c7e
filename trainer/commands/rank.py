"""train: one rank of a run, under whatever launcher has started it. `python -m trainer` ends up here."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Sequence
from pathlib import Path

from trainer.cluster import machine_checks, run_folders
from trainer.cluster.spawn import spawn
from trainer.commands import hello
from trainer.commands.parsers import Parser, add_config, split
from trainer.config.config import Config, find_config
from trainer.config.errors import ConfigError
from trainer.config.keys import fields_of
from trainer.rundir import RunDir
from trainer.trainer import Trainer
from trainer.world.launchers import detect_world
from trainer.world.signals import die_with_parent
from trainer.world.world import World

EPILOG = """\
Start it under any launcher, and it finds out its place:
  python -m trainer --name first                                   one process
  python -m trainer --spawn 4 --name first                         four, on this machine
  torchrun --nproc-per-node 4 -m trainer --name first
  srun python -m trainer --name first                              in an sbatch script, or in a shell of salloc
  mpirun python -m trainer --name first                            Open MPI
`python -m trainer hello` instead shows, in seconds, whether the ranks of such a start find each other.
The same again, with the same name, goes on where the run is. Without a name the job's id makes one.
Any key=value sets a key of the configuration; docs/configuration.md lists all. launch.nodes and the like are for
launch.py alone: here the launcher says how many ranks there are.
"""


def main(words: Sequence[str]) -> int:
    """Train in this process; returns the exit status, unless a stop's SystemExit carries it. Raises ConfigError."""
    if words[:1] == ["hello"]:
        return hello.main(words[1:])
    parser = Parser("python -m trainer", "One rank of a run, under any launcher.", EPILOG)
    add_config(parser)
    parser.add_argument("--name", metavar="RUN", help="name of the run, which goes on if it exists (launch.name)")
    parser.add_argument("--spawn", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument("words", nargs="*", metavar="key=value|FOLDER", help="a key of the configuration, or a run")
    given = parser.parse_intermixed_args(words)
    folders, overrides = split(given.words)
    if folders:
        return _go_on(Path(folders[0]), overrides)
    if given.name is not None:
        overrides.append(f"launch.name={given.name}")
    if given.spawn is None:
        return _train(given.config, overrides, given.site)
    config = run_folders.with_root(_load(given.config, overrides, given.site), find_config(given.config).stem)
    overrides.append(f"launch.name={config.launch.name}")
    return spawn(given.spawn, functools.partial(_train, given.config, overrides, given.site))


def _train(source: str, overrides: Sequence[str], site: str | None) -> int:
    """Start the run, or go on with it, in this rank."""
    world = detect_world()
    config = _load(source, overrides, site)
    stem = find_config(source).stem
    if config.launch.name is None and world.launcher != "python":  # one that all ranks find, and a requeued job again
        named = dataclasses.replace(config.launch, name=f"{stem}-{world.job_id}")
        config = dataclasses.replace(config, launch=named)
    config = run_folders.with_root(config, stem)
    machine_checks.check_names(config)
    run = RunDir(Path(config.launch.root) / str(config.launch.name))
    new = not run.config.exists()
    if new and world.rank == 0:
        run_folders.create(config)
    elif not new:
        _check_same(config, Config.load(run.config))
    try:
        return _rank(config, run, world)
    except ConfigError:
        if new and world.rank == 0 and not run.checkpoints.exists():
            run_folders.remove(run)
        raise


def _go_on(folder: Path, overrides: Sequence[str]) -> int:
    """Go on with the run in that folder, in this rank."""
    if overrides:
        raise ConfigError(f"{overrides[0]}: a run that goes on keeps its configuration")
    world, run = detect_world(), run_folders.find(str(folder), str(folder.parent))
    return _rank(run_folders.load(run), run, world)


def _rank(config: Config, run: RunDir, world: World) -> int:
    if world.launcher == "submitit-local":
        die_with_parent(signal.SIGTERM)  # when the local launcher is killed its ranks stop, rather than train on unseen
    elif world.rank == 0:
        run_folders.note_submission(run, world.job_id)
    Trainer(config)()
    return 0


def _load(source: str, overrides: Sequence[str], site: str | None) -> Config:
    return Config.load(source, overrides, site or run_folders.site())


def _check_same(config: Config, started: Config) -> None:
    """Raise ConfigError when the run was started with other values: going on with these, it would be neither."""
    before = {key: value for key, _, value in fields_of(started)}
    for key, _, value in fields_of(config):
        if value != before[key] and not key.startswith("launch."):
            raise ConfigError(
                f"{key}={value}: {config.launch.name} was started with {before[key]}, which a run keeps; leave it, or "
                "choose another --name"
            )

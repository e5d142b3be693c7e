"""resume: continue a run in a new job, perhaps on another number of ranks."""

from __future__ import annotations

import argparse

from trainer.commands.parsers import (
    JOB_OPTIONS,
    LAUNCH_KEY,
    NO_RUN,
    Parser,
    add_key_options,
    add_sweep,
    add_ways,
    overrides_of,
    split,
)
from trainer.config.errors import ConfigError
from trainer.say import command

DESCRIPTION = "Continue a run in a new job, from its newest intact checkpoint."


def add_arguments(parser: Parser) -> None:
    """Declare what resume takes."""
    add_sweep(parser, "continue each run of this sweep that has not finished and has no job")
    parser.add_argument("run", metavar="RUN", nargs="?", help="name or folder of the run")
    add_key_options(parser, JOB_OPTIONS)
    add_ways(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar=LAUNCH_KEY,
        help="a launch.* key to change; the rest of the run's configuration stays as it is",
    )


def run(args: argparse.Namespace) -> int:
    """Continue a run, or those of a sweep; returns the exit status."""
    if args.sweep is not None:
        return _resume_sweep(args)
    if args.run is None:
        raise ConfigError(NO_RUN)
    from trainer.cluster import code_origin, machine_checks, run_folders
    from trainer.cluster.prepare import Way, prepare
    from trainer.cluster.run_status import jobs_in_queue
    from trainer.commands import start

    way, overrides = Way.of(args), overrides_of(args, JOB_OPTIONS)
    root = run_folders.runs_root([word for word in overrides if word.startswith("launch.root=")])
    folder = run_folders.find_run(args.run, root)
    machine_checks.check_run_writable(folder.path)
    for word in overrides:
        if not word.startswith("launch.") or word.startswith("launch.name="):
            raise ConfigError(
                f"{word}: a resumed run keeps its configuration; change only launch.* keys, or start a new run"
            )
    config = run_folders.load(folder, overrides)
    runs_copy = way not in (Way.LOCAL, Way.DEBUG)
    config = prepare(config, way, search=code_origin.search_path(folder, config, runs_copy))
    if way is Way.DRY_RUN:
        return start.dry_run(config)
    if jobs := jobs_in_queue(folder):
        cancel = command(f"cancel {folder.name}{start.root_hint(config.launch)}")
        raise ConfigError(f"{folder.name}: job {jobs[0]} of this run is in the queue; end it first: `{cancel}`")
    config.save(folder.config)
    return start.start(config, folder, way)


def _resume_sweep(args: argparse.Namespace) -> int:
    """Continue the runs of a sweep one after the other; returns the largest exit status."""
    from trainer.cluster import run_folders
    from trainer.cluster.run_status import StatusReader

    if args.follow or args.debug:
        raise ConfigError(f"--sweep {args.sweep}: has several runs; --follow and --debug are for one")
    names, overrides = split([*([] if args.run is None else [args.run]), *args.overrides])
    root = run_folders.runs_root([word for word in overrides if word.startswith("launch.root=")])
    runs = run_folders.find_runs(names, root, args.sweep)
    worst = 0
    for folder, status in zip(runs, StatusReader().read(runs)):
        if status.alive or status.state == "finished":
            print(f"{folder.name}: {status.state}, so there is nothing to resume")
            continue
        one = {**vars(args), "sweep": None, "run": str(folder.path), "overrides": overrides}
        worst = max(worst, run(argparse.Namespace(**one)))
    return worst

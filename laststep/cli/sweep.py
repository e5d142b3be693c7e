"""sweep: submit one run per combination of values, as a single Slurm array."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from laststep.cli.parsers import Parser, add_new_run, config_of, overrides_of, stem_of
from laststep.config.errors import ConfigError
from laststep.config.schema import Launch
from laststep.say import command, counted, note

if TYPE_CHECKING:
    from laststep.config.config import Config
    from laststep.submission.sweep import Change

DESCRIPTION = """\
Submit one run per combination of values, as one Slurm array. The same command
again submits the runs that are missing or have not finished. Under --local, a
run that fails does not end the sweep; Ctrl-C does, and keeps the run's steps."""
EPILOG = """\
Keys vary by v1,v2 or 0..4, a script's own words by @:
  {program} sweep --name scan --parallel 4 optim.lr=0.1,0.03 seed=0..4
  {program} sweep --nodes 2 train.py --lr @1e-3,3e-4 --betas 0.9,0.95
"""


def add_arguments(parser: Parser) -> None:
    """Declare what sweep takes."""
    add_new_run(parser, help="set a configuration key, or give it several values")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and the sbatch script; start nothing")
    parser.add_argument("--local", action="store_true", help="run them on this machine, one after another")
    parser.add_argument("--parallel", type=int, metavar="K", help="run at most K at a time (default: all)")


def run(args: argparse.Namespace) -> int:
    """Submit the missing runs of a sweep; returns the exit status."""
    from laststep.code import task_check
    from laststep.config.config import Config
    from laststep.config.machine import Machine, Way
    from laststep.config.reads import given_by
    from laststep.runs import run_folders
    from laststep.submission import submission, sweep

    overrides = overrides_of(args)
    varied = [word for word in overrides if not word.startswith("script=") and sweep.has_several_values(word)]
    _check(args, varied)
    shared = [word for word in overrides if word not in varied]
    source = config_of(args, overrides)
    config = Config.load(source, shared, args.site or run_folders.site())
    changes = sweep.combinations(varied, args.passed_on)
    way = Way.LOCAL if args.local else Way.DRY_RUN if args.dry_run else Way.SLURM
    machine = Machine(way, sweep=True, words=overrides, source=source)
    config = submission.ready(config, machine, stem_of(source, config))
    if args.dry_run:
        return _show(config, changes, source, machine.is_here)
    if machine.is_here:
        here = functools.partial(submission.start, way=way, source=source or "none")
        return sweep.run_here(config, changes, given_by(machine), here)
    if unchecked := task_check.note_unchecked(config, machine):
        note(f"[laststep] {unchecked}")
    submitted = sweep.submit_missing(config, changes, args.parallel, given_by(machine))
    note(submission.what_trains(config, source), sys.stdout, indent=7)
    print(f"sweep  {config.launch.name}: {counted(submitted.size, 'run')}")
    if submitted.job_id is None:
        print("       all of them have finished or are in the queue")
        return 0
    limit, runs = f", {args.parallel} at a time" if args.parallel else "", submitted.runs
    print(f"job    {submitted.job_id}: {counted(len(runs), 'run')}{limit}, {runs[0]} to {runs[-1]}")
    elsewhere = "" if config.launch.root == os.path.abspath(Launch().root) else f" launch.root={config.launch.root}"
    print(f"next   {command(f'status --sweep {config.launch.name}{elsewhere}')}", flush=True)
    return 0


def _check(args: argparse.Namespace, varied: Sequence[str]) -> None:
    """Raise ConfigError unless something varies that can, and --parallel makes sense."""
    from laststep.submission import sweep

    if not varied and not sweep.labels(args.passed_on):
        example = "--lr @1e-3,3e-4" if args.passed_on else "optim.lr=0.1,0.03 seed=0..4"
        what = "mark words of the script that have several" if args.passed_on else "give a key several values"
        raise ConfigError(f"nothing varies: {what}, e.g. {example}")
    for word in varied:
        if word.startswith("launch."):
            raise ConfigError(f"{word}: all jobs of an array ask for the same; launch.* cannot vary")
    if args.parallel is not None and args.parallel < 1:
        raise ConfigError(f"--parallel {args.parallel}: must be at least 1")
    if args.parallel is not None and args.local:
        raise ConfigError(f"--parallel {args.parallel}: with --local one run follows another; leave this out")


def _show(config: Config, changes: Sequence[Change], source: str | None, here: bool) -> int:
    """--dry-run: print the runs, and what each of them has; returns the exit status."""
    from laststep.submission import submission, sweep

    names = list(sweep.plan(config, changes))
    print(f"# {submission.what_trains(config, source)}")
    print(f"# sweep {config.launch.name}: {counted(len(names), 'run')}")
    for name, change in zip(names, changes):
        print(f"{name}  {' '.join(f'{key}={value}' for key, value in change.typed.items())}")
    print(f"\n# of each of them, but for these keys\n{config.to_yaml()}")
    if here:
        print(f"# one after another on this machine, {counted(config.launch.world_size, 'rank')} each")
        return 0
    return submission.show_script(config)

"""submit: start a new run."""

from __future__ import annotations

import argparse

from trainer import __version__
from trainer.commands.parsers import (
    NEW_RUN_OPTIONS,
    Parser,
    add_config,
    add_key_options,
    add_overrides,
    add_ways,
    overrides_of,
)
from trainer.commands.verbs import verb_list
from trainer.say import program

DESCRIPTION = "Start a new run: submit it to Slurm, or run it on this machine."
EPILOG = f"""\
verbs (default: submit; for the help of a verb: {program()} help VERB):
{verb_list()}

Any key=value sets a configuration key, e.g. optim.lr=0.05 model.name=resnet18;
docs/configuration.md lists them all.
Exit status: 0 done; 1 the run failed; 2 the command or the configuration is
wrong; 130 stopped by Ctrl-C, 143 by SIGTERM.
"""


def add_arguments(parser: Parser) -> None:
    """Declare what submit takes."""
    parser.add_argument("--version", action="version", version=f"laststep {__version__}", help="print the version")
    add_config(parser)
    add_key_options(parser, NEW_RUN_OPTIONS)
    add_ways(parser)
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Start a new run; returns the exit status."""
    from trainer.cluster import run_folders
    from trainer.cluster.prepare import Way, prepare_new
    from trainer.commands import start
    from trainer.config.config import Config, find_config

    way = Way.of(args)
    config = Config.load(args.config, overrides_of(args, NEW_RUN_OPTIONS), args.site or run_folders.site())
    config = prepare_new(config, way, stem=find_config(args.config).stem)
    if way is Way.DRY_RUN:
        return start.dry_run(config)
    with run_folders.created(config) as folder:
        status = start.start(config, folder, way)
    if status == 2 and not folder.checkpoints.exists():  # the ranks refused the configuration
        run_folders.remove(folder)
    return status

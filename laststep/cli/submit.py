"""submit: start a new run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from laststep import __version__, rooms
from laststep.cli.parsers import Parser, add_new_run, add_ways, config_of, overrides_of, stem_of
from laststep.cli.verbs import verb_list
from laststep.config.errors import ConfigError
from laststep.say import note

if TYPE_CHECKING:
    from laststep.config.config import Config
    from laststep.config.machine import Machine
    from laststep.rundir import RunDir

DESCRIPTION = "Start a new run: submit it to Slurm, or run it on this machine."
EPILOG = f"""\
verbs (default: submit; for the help of a verb: {{program}} help VERB):
{verb_list()}

A script comes last, with its own words; so does a module, after -m, and any
other command, after --:
  {{program}} --nodes 2 train.py --lr 3e-4
To list all keys with their values: `{{program}} --config mnist --dry-run`.
Exit status: 0 done; 1 the run failed; 2 the command or the configuration is
wrong; 130 stopped by Ctrl-C, 143 by SIGTERM.
"""


def add_arguments(parser: Parser) -> None:
    """Declare what submit takes."""
    parser.add_argument("--version", action="version", version=f"laststep {__version__}", help="print the version")
    add_new_run(parser)
    parser.add_argument(
        "--from",
        dest="source",
        metavar="RUN[@STEP]",
        help="begin with the configuration, the newest checkpoint and the metrics of this run; @STEP: after that step, "
        "which is done again here if it has no checkpoint; or with the weights and the optimiser that another tool "
        "has saved in a file or folder",
    )
    add_ways(parser)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="see in seconds whether it works: some steps, a save, a resume and a validation, in a throwaway folder",
    )


def run(args: argparse.Namespace) -> int:
    """Start a new run; returns the exit status."""
    from laststep.checkpoint.store import CheckpointStore
    from laststep.code import task_check
    from laststep.config.config import Config
    from laststep.config.machine import Machine, Way
    from laststep.config.reads import given_by
    from laststep.ranks.slurm import own_nodes
    from laststep.runs import run_folders, weights_source
    from laststep.submission import submission

    way, overrides, begins = Way.of(args), overrides_of(args), None
    source: RunDir | None = None
    step: int | None = None
    if (nodes := own_nodes()) is not None:
        way = Way.LOCAL if way in (Way.SLURM, Way.FOLLOW) else way
        overrides = [*nodes.words, *overrides]
    if args.source is not None and weights_source.is_foreign(args.source):
        overrides, args.source = [*overrides, f"checkpoint.start_from={args.source}"], None
    if args.source is None:
        begins = config_of(args, overrides)
        config = Config.load(begins, overrides, args.site or run_folders.site())
        stem = stem_of(begins, config)
    else:
        if args.config is not None:
            raise ConfigError(
                f"--config {args.config}: --from {args.source} has a configuration already; leave this out"
            )
        if args.site is not None:
            raise ConfigError(f"--site {args.site}: --from {args.source} has a configuration already; leave this out")
        from laststep.submission import branch

        source, step = branch.find_source(args.source, overrides)
        config, stem = branch.configure(source, overrides, step), source.name
    if args.smoke:
        return _smoke(args, config, Machine(Way.LOCAL, words=overrides, source=begins))
    machine = Machine(way, words=overrides, source=begins)
    config = submission.ready(config, machine, stem)
    origin = (begins or "none") if source is None else f"of {source.name}"
    if args.dry_run:
        return submission.show(config, origin, here=machine.is_here)
    if unchecked := task_check.note_unchecked(config, machine):
        note(f"[laststep] {unchecked}")
    with run_folders.created(config, given_by(machine)) as folder:
        copied = [] if source is None else [_copy_state(source, folder, step)]
        status = submission.start(config, folder, way, origin)
    if status == 2 and CheckpointStore(folder.checkpoints).steps() == copied:  # the ranks refused the configuration
        run_folders.remove(folder)
    return status


def _copy_state(source: RunDir, folder: RunDir, step: int | None) -> int:
    """Copy what the new run begins with; does a step without a checkpoint again. Raises ConfigError."""
    from laststep.checkpoint.store import CheckpointStore
    from laststep.submission import branch

    if step is None or step in CheckpointStore(source.checkpoints).steps():
        return branch.copy_state(source, folder, step)
    if rooms.lacks_verb("replay"):
        raise ConfigError(f"--from {source.name}@{step}: there is no checkpoint of this step")
    from laststep.replay import again

    with again.up_to(source, step) as copy:
        return branch.copy_state(source, folder, step, copy)


def _smoke(args: argparse.Namespace, config: Config, machine: Machine) -> int:
    """Returns the exit status. Raises ConfigError."""
    from laststep.cli import prove

    for option, given in (("--from", args.source), ("--follow", args.follow), ("--debug", args.debug)):
        if given:
            raise ConfigError(f"--smoke {option}: --smoke trains a new run on this machine; leave {option} out")
    if args.dry_run:
        raise ConfigError("--smoke --dry-run: --smoke leaves nothing behind; leave --dry-run out")
    return prove.smoke(config, machine)

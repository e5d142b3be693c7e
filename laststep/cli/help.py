"""help: print the help of the command or of a verb, as --help does."""

from __future__ import annotations

import argparse

from laststep.cli.parsers import Parser
from laststep.cli.verbs import DEFAULT, VERBS
from laststep.config.errors import ConfigError, nearest

DESCRIPTION = "Print the help of a verb, or of the command with the list of verbs."


def add_arguments(parser: Parser) -> None:
    """Declare what help takes."""
    parser.add_argument("verb", nargs="?", default=DEFAULT, metavar="VERB", help=f"the verb (default: {DEFAULT})")


def run(args: argparse.Namespace) -> int:
    """Print the help; returns the exit status."""
    if args.verb not in VERBS:
        raise ConfigError(f"{args.verb}: no such verb; {nearest(args.verb, list(VERBS))}")
    VERBS[args.verb].parser().print_help()
    return 0

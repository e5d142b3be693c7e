"""list: print the names of all runs, for scripts."""

from __future__ import annotations

import argparse

from laststep.cli.parsers import ROOT_KEY, Parser
from laststep.runs import run_folders

DESCRIPTION = "Print the names of all runs, one per line, the newest last."


def add_arguments(parser: Parser) -> None:
    """Declare what list takes."""
    parser.add_argument("overrides", nargs="*", metavar=ROOT_KEY, help="the folder that holds all runs")


def run(args: argparse.Namespace) -> int:
    """Print the names; returns the exit status."""
    for folder in run_folders.all_runs(run_folders.runs_root(args.overrides)):
        print(folder.name)
    return 0

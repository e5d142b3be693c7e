"""logs: print the logs of a run's ranks, merged by time."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

from trainer.cluster import run_folders
from trainer.cluster.merged_logs import Line, MergedLogs, attempt_numbers
from trainer.cluster.run_status import StatusReader, records_of
from trainer.commands.parsers import Parser, add_run
from trainer.config.errors import ConfigError
from trainer.rundir import RunDir

POLL_S = 1.0
COLOURS = (36, 33, 35, 32, 34, 31)  # of the terminal (ECMA-48, SGR)

DESCRIPTION = "Print the logs of a run's ranks, merged by time, through all attempts."


def add_arguments(parser: Parser) -> None:
    """Declare what logs takes."""
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank")
    parser.add_argument("--attempt", type=int, metavar="A", help="only this attempt, by its number in `status RUN`")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing, through every requeue, until the run ends"
    )
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Print the logs of one rank or of all, of one attempt or of all; returns the exit status.

    --follow ends with the run: 0 if it finished, 1 if it ended otherwise.
    """
    folder = run_folders.find_run(args.run, run_folders.runs_root(args.overrides))
    logs = MergedLogs(folder, args.rank)
    ranks = sorted(logs.ranks())
    if args.rank is not None and args.rank not in ranks:
        raise ConfigError(f"--rank {args.rank}: no such log; logs so far: {_listed(ranks)}")
    attempts = sorted(attempt_numbers(records_of(folder)).values())
    if args.attempt is not None and args.attempt not in attempts:
        raise ConfigError(f"--attempt {args.attempt}: no such attempt; attempts so far: {_listed(attempts)}")
    printer = _Printer(folder, args.attempt)
    if not args.follow:
        printer.print(logs.read(whole=True))
        return 0
    reader = StatusReader()
    while True:
        (status,) = reader.read([folder])  # before the logs, so that the last lines of the run are still printed
        printer.print(logs.read(whole=not status.alive))
        if not status.alive:
            print(f"[laststep] {folder.name}: {status.state}{status.why and f', {status.why}'}", file=sys.stderr)
            return 0 if status.state == "finished" else 1
        time.sleep(POLL_S)


class _Printer:
    """Prints lines, each with its rank in front; `attempt` selects those of one attempt."""

    def __init__(self, run: RunDir, attempt: int | None) -> None:
        self._run, self._attempt = run, attempt
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def print(self, lines: Iterator[Line]) -> None:
        if self._attempt is not None:
            numbers = attempt_numbers(records_of(self._run))
            lines = (line for line in lines if numbers.get(line.attempt) == self._attempt)
        for line in lines:
            mark = f"{line.rank:>3} |"
            if self._colour:
                mark = f"\x1b[{COLOURS[line.rank % len(COLOURS)]}m{mark}\x1b[0m"
            print(mark, line.text)
        sys.stdout.flush()


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:20])
    return f"{shown}{', ...' if len(numbers) > 20 else ''}" if numbers else "none"

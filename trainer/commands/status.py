"""status: show the state of runs, from one squeue and the runs' own files."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cluster import run_folders
from trainer.cluster.run_status import RunStatus, StatusReader
from trainer.commands.parsers import Parser, add_runs, split
from trainer.config.errors import ConfigError
from trainer.records.metrics import is_step, last_lines
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_S = 2.0  # between two readings of the files
WIDE = 250  # columns
DESCRIPTION = """\
Show the state of all runs, or of the named ones. A single run is shown with
its attempts."""
Read = Callable[[StatusReader], "list[RunStatus]"]
Draw = Callable[["Sequence[RunStatus]"], "RenderableType"]


def add_arguments(parser: Parser) -> None:
    """Declare what status takes."""
    parser.add_argument("--sweep", metavar="NAME", help="show the runs of this sweep, best first")
    parser.add_argument(
        "--by",
        metavar="METRIC",
        help="the metric that ranks them: a key of the epoch lines in metrics.jsonl (default: val_loss)",
    )
    parser.add_argument("--watch", action="store_true", help="keep the table up to date until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    add_runs(parser, nargs="*")


def run(args: argparse.Namespace) -> int:
    """Print the status of runs, once or until Ctrl-C; returns the exit status."""
    names, overrides = split(args.words)
    root = run_folders.runs_root(overrides)
    if args.sweep is None:
        if args.by is not None:
            raise ConfigError(f"--by {args.by}: ranks the runs of a sweep; give --sweep NAME too")
        read, draw = _runs(names, root)
    else:
        if names:
            raise ConfigError(f"{names[0]}: name a sweep or runs, not both")
        read, draw = _sweep(RunDir(Path(root) / args.sweep), args.by or "val_loss")
    if args.watch and (args.json or not sys.stdout.isatty()):
        raise ConfigError("--watch: keeps a table on a terminal; leave it out for a file, a pipe or --json")
    reader = StatusReader()
    if args.json:
        print(json.dumps([vars(status) for status in read(reader)], indent=1))
    elif args.watch:
        _watch(lambda: draw(read(reader)))
    else:
        from rich.console import Console

        # As wide as the terminal; in a file or a pipe nothing is cut off.
        console = Console() if sys.stdout.isatty() else Console(width=WIDE)
        console.print(draw(read(reader)))
    return 0


def _watch(draw: Callable[[], RenderableType]) -> None:
    """Redraw the terminal until Ctrl-C."""
    from rich.live import Live

    with Live(draw(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(draw(), refresh=True)


def _runs(names: Sequence[str], root: str) -> tuple[Read, Draw]:
    """How to read and draw the named runs, or all runs in the root; a single named run with its attempts."""
    from rich.console import Group
    from rich.text import Text

    from trainer.commands.status_tables import run_details, runs_table

    def selected() -> list[RunDir]:
        return run_folders.find_runs(names, root) if names else run_folders.all_runs(root)

    def draw(found: Sequence[RunStatus]) -> RenderableType:
        if not found:
            return Text(f"no run in {root}/ yet")
        if len(names) == len(found) == 1:
            return Group(runs_table(found), *run_details(selected()[0]))
        return runs_table(found)

    return lambda reader: reader.read(selected()), draw


def _sweep(sweep: RunDir, metric: str) -> tuple[Read, Draw]:
    """How to read and draw the runs of a sweep, best first: the lowest loss, or the highest of any other metric."""
    from trainer.cluster.sweep import members
    from trainer.commands.status_tables import or_dash, runs_table

    varied = members(sweep)

    def value(run: str) -> float | None:
        lines = last_lines(RunDir(sweep.path.parent / run).metrics)
        return next((line[metric] for line in reversed(lines) if metric in line and not is_step(line)), None)

    def read(reader: StatusReader) -> list[RunStatus]:
        found = reader.read([RunDir(sweep.path.parent / run) for run in varied])
        sign = 1 if "loss" in metric else -1
        values = {status.run: value(status.run) for status in found}
        return sorted(found, key=lambda status: math.inf if (v := values[status.run]) is None else sign * v)

    def draw(found: Sequence[RunStatus]) -> RenderableType:
        keys = list(dict.fromkeys(key for change in varied.values() for key in change))
        columns = {key: {run: str(change.get(key, "")) for run, change in varied.items()} for key in keys}
        columns[metric] = {run: or_dash(value(run), "{:.4f}") for run in varied}
        return runs_table(found, columns)

    return read, draw

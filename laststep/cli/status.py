"""status: show the state of runs, from one squeue and the runs' own files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep import rooms
from laststep.cli.parsers import Parser, add_runs, split
from laststep.config.errors import ConfigError
from laststep.records.metrics import metrics_in, newest_epoch
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.pending import Pending, explain
from laststep.runs.run_status import STATES, RunStatus, StatusReader, time_of

if TYPE_CHECKING:
    from laststep.cli.status_tables import View

DESCRIPTION = """\
Show the state of all runs, or of the named ones: those that run, then those
that wait, then the others, the newest first. A single run is shown with its
attempts, and why it waits."""
WAITING = ("queued", "requeued", "unknown")
EXPLAIN_EVERY_S = 60.0  # under --watch


def add_arguments(parser: Parser) -> None:
    """Declare what status takes."""
    parser.add_argument("--state", metavar="STATE[,STATE]", help="only runs in these states, e.g. failed,lost")
    parser.add_argument("-n", type=int, metavar="N", help="only the first N runs")
    parser.add_argument("--sweep", metavar="NAME", help="the runs of this sweep, best first")
    parser.add_argument(
        "--by",
        metavar="METRIC",
        help="the metric that ranks them (default: val_loss)",
    )
    parser.add_argument("--watch", action="store_true", help="keep the table up to date; arrows scroll, q ends it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the status of runs, once or until the user ends it; returns the exit status."""
    names, overrides = split(args.words)
    root = run_folders.runs_root(overrides)
    states = _states(args.state)
    if args.n is not None and args.n < 1:
        raise ConfigError(f"-n {args.n}: give a number of runs, 1 or more")
    if args.sweep is None and args.by is not None:
        raise ConfigError(f"--by {args.by}: ranks the runs of a sweep; give --sweep NAME too")
    if args.sweep is not None and names:
        raise ConfigError(f"{names[0]}: name a sweep or runs, not both")
    if args.watch and (args.json or not sys.stdout.isatty()):
        raise ConfigError("--watch: keeps a table on a terminal; leave it out for a file, a pipe or --json")
    shown = _Runs(names, root) if args.sweep is None else _Sweep(RunDir(Path(root) / args.sweep), args.by)
    reader = StatusReader()

    def read() -> _Reading:
        found = shown.read(reader)
        wanted = [status for status in found if status.state in states]
        return _Reading(found, wanted[: args.n], len(wanted) - len(wanted[: args.n]))

    if args.json:
        wanted = read().wanted
        fields = (
            {
                **vars(one),
                "time_s": vars(time_of(one)),
                "links": rooms.told("links", RunDir(one.folder)),
                **rooms.told("fields", RunDir(one.folder)),
                **shown.fields(one),
            }
            for one in wanted
        )
        print(json.dumps(list(fields), indent=1))
    elif args.watch:
        from laststep.cli.status_tables import watch

        watch(read, shown.view)
    else:
        from rich.console import Console

        console = Console()
        # No wider than the terminal; in a file or a pipe nothing is cut off.
        console.print(shown.view(read(), console.width if sys.stdout.isatty() else None), soft_wrap=True)
    return 0


class _Reading(NamedTuple):
    """The runs found, those of them to show, and how many `-n` leaves out."""

    found: list[RunStatus]
    wanted: list[RunStatus]
    more: int


class _Runs:
    """The named runs, in this order, or all runs in the root; a single named run with its attempts.

    `read` returns the status of each run, in the order in which to show them; `view` the wanted runs in this number of
    columns of the terminal (None: any number); `fields` what a run's JSON object has besides.
    """

    def __init__(self, names: Sequence[str], root: str) -> None:
        self._names, self._root = names, root
        self._pending: Pending | None = None  # of a single run
        self._asked: object = None
        self._asked_at = 0.0

    def read(self, reader: StatusReader) -> list[RunStatus]:
        if self._names:
            found = reader.read(self._named())
            if len(found) == 1:
                self._explain(found[0])
            return found
        newest_first = reader.read(run_folders.all_runs(self._root)[::-1])
        return sorted(newest_first, key=lambda status: (not status.alive, status.state in WAITING))

    def view(self, reading: _Reading, width: int | None) -> View:
        from rich.text import Text

        from laststep.cli.status_tables import View, run_view, table_view

        if not reading.found:
            return View([], [Text(f"no run in {self._root}/ yet")])
        if len(self._names) == len(reading.found) == len(reading.wanted) == 1:
            return run_view(self._named()[0], reading.wanted[0], self._pending, width)
        return table_view(*reading, width, {})

    def fields(self, status: RunStatus) -> dict[str, Any]:
        if len(self._names) != 1:  # for each of many, Slurm would be asked too often
            return {}
        return {"pending": None if self._pending is None else dataclasses.asdict(self._pending)}

    def _explain(self, status: RunStatus) -> None:
        """Ask Slurm why a single run waits; under --watch again once it says another reason, or after a while."""
        asked = (status.job_id, status.state, status.why)
        if asked != self._asked or time.monotonic() > self._asked_at + EXPLAIN_EVERY_S:
            self._pending, self._asked = explain(self._named()[0], status), asked
            self._asked_at = time.monotonic()

    def _named(self) -> list[RunDir]:
        return run_folders.find_runs(self._names, self._root)


class _Sweep:
    """The runs of a sweep, best first: the lowest loss, or the highest of any other metric. As `_Runs`."""

    def __init__(self, sweep: RunDir, metric: str | None) -> None:
        from laststep.submission.sweep import members

        self._varied = members(sweep)
        self._folders = {run: RunDir(sweep.path.parent / run) for run in self._varied}
        if metric is not None:
            self._check(metric)
        self._metric = metric or "val_loss"
        self._values: dict[str, float | None] = {}

    def _check(self, metric: str) -> None:
        """Raise ConfigError when there are epochs, and none has this metric."""
        names: dict[str, None] = {}
        for folder in self._folders.values():
            names.update(dict.fromkeys(metrics_in(newest_epoch(folder.metrics) or {})))
        if names and metric not in names:
            raise ConfigError(f"--by {metric}: no run of this sweep has this metric; choose from {', '.join(names)}")

    def read(self, reader: StatusReader) -> list[RunStatus]:
        found = reader.read(list(self._folders.values()))
        for run, folder in self._folders.items():
            value = (newest_epoch(folder.metrics, self._metric) or {}).get(self._metric)
            self._values[run] = value if isinstance(value, (int, float)) else None
        sign = 1 if "loss" in self._metric else -1
        return sorted(found, key=lambda status: math.inf if (v := self._values[status.run]) is None else sign * v)

    def view(self, reading: _Reading, width: int | None) -> View:
        from laststep.cli.status_tables import number, table_view
        from laststep.submission.sweep import short_names

        keys = short_names(key for change in self._varied.values() for key in change)
        columns = {
            short: {run: change.typed.get(key, "") for run, change in self._varied.items()}
            for key, short in keys.items()
        }
        columns[self._metric] = {run: number(value) for run, value in self._values.items()}
        return table_view(*reading, width, columns)

    def fields(self, status: RunStatus) -> dict[str, Any]:
        run = status.run
        return {"varied": self._varied[run], "metric": {self._metric: self._values[run]}}


def _states(words: str | None) -> Sequence[str]:
    """The states in STATE[,STATE]; all if there is none. Raises ConfigError."""
    states = STATES if words is None else words.split(",")
    for state in states:
        if state not in STATES:
            raise ConfigError(f"--state {words}: no such state as {state!r}; choose from {', '.join(STATES)}")
    return states

"""logs: print the logs of a run's ranks, merged by time."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from laststep.cli.parsers import Parser, add_run, named_run
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.pending import WaitReport, waiting_for
from laststep.runs.run_logs import BEGINS, OF_OTHERS, Line, MergedLogs, attempt_numbers, print_cause
from laststep.runs.run_status import StatusReader, records_of, still_prints
from laststep.say import command, counted, note

POLL_S = 1.0
RANK_COLOURS = (36, 33, 35, 32, 34, 31)  # of the terminal (ECMA-48, SGR)
RED, YELLOW = 31, 33
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
ERROR = re.compile(r"(error: |Traceback \(most recent|[\w.]+(Error|Exception)(:|$)|.* failed:$)|.*\bERROR\b")
WARNING = re.compile(r".*(\bWARNING\b|Warning: )")

DESCRIPTION = "Print the logs of a run's ranks, merged by time, through all attempts."
EPILOG = """\
TIME is 14:30 or 2026-11-22T14:30, or how long ago: 90s, 10m, 2h or 1d. REGEX is
Python's; (?i) at its beginning ignores case.
"""


def add_arguments(parser: Parser) -> None:
    """Declare what logs takes."""
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank")
    parser.add_argument("--attempt", type=int, metavar="A", help="only this attempt, as `status RUN` numbers them")
    parser.add_argument("--grep", type=_regex, metavar="REGEX", help="only lines that match")
    parser.add_argument("--since", type=_moment, metavar="TIME", help="only lines written since then")
    parser.add_argument("-n", "--tail", type=_count, metavar="N", help="only the last N lines")
    parser.add_argument(
        "--all",
        action="store_true",
        help="also lines of submitit, srun and slurmstepd, and of ranks that only begin or lost another one",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="the error that ended the last attempt (or A), complete"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until the run ends")
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Print the logs of one rank or of all, of one attempt or of all; returns the exit status.

    --follow ends with the run: 0 if it finished, 1 if it ended otherwise.
    """
    folder = named_run(args)
    if args.traceback:
        if args.follow or args.all or any(one is not None for one in (args.rank, args.grep, args.since, args.tail)):
            raise ConfigError("--traceback: prints what is recorded, not the logs: only --attempt goes with it")
        return _print_error(folder, args.attempt)
    logs, reader, printer = MergedLogs(folder, args.rank), StatusReader(), _Printer(folder, args)
    if args.tail is not None and args.attempt is None and args.since is None:  # these need every line's time or attempt
        logs.skip_to_last(args.tail, printer.wants)
    if args.follow:
        return _follow(folder, args, logs, reader, printer)
    _check_exists(folder, args, logs)
    printer.print(_last(printer.select(logs.read(whole=True)), args.tail))
    if printer.hidden and not printer.printed:
        _note(f"{folder.name}: {counted(printer.hidden, 'line')}, all of submitit and Slurm: --all shows them")
    elif not logs.ranks():
        (status,) = reader.read([folder])
        _note(f"{folder.name}: no log yet; {waiting_for(status) or f'{status.state} {status.why}'.strip()}")
    return 0


def _print_error(folder: RunDir, attempt: int | None) -> int:
    """Print the error of an attempt as it is recorded, with every frame of its traceback; returns the exit status."""
    records = [record for record in records_of(folder) if record["error"] and attempt in (None, record["attempt"])]
    if not records:
        none = "no attempt has recorded an" if attempt is None else f"attempt {attempt} has recorded no"
        show = command(f"status {run_folders.typed(folder)}")
        raise ConfigError(f"--traceback: {folder.name}: {none} error; `{show}` shows how each attempt ended")
    print(records[-1]["error"])
    return 0


def _follow(folder: RunDir, args: argparse.Namespace, logs: MergedLogs, reader: StatusReader, printer: _Printer) -> int:
    waiting = WaitReport(_note)
    tail = args.tail
    while True:
        (status,) = reader.read([folder])  # before the logs, so that the last lines of the run are still printed
        ended = not status.alive and not still_prints(folder)
        if ended or _never_comes(folder, args.rank):
            _check_exists(folder, args, logs)
        printer.print(_last(printer.select(logs.read(whole=ended)), tail))
        tail = None
        if ended:
            if status.state == "failed":
                _note(f"{folder.name}: failed")
                print_cause(folder)
            else:
                _note(f"{folder.name}: {status.state}{status.why and f', {status.why}'}")
            return 0 if status.state == "finished" else 1
        waiting.update(status)
        time.sleep(POLL_S)


def _check_exists(folder: RunDir, args: argparse.Namespace, logs: MergedLogs) -> None:
    """Raise ConfigError when there is no such rank or attempt."""
    ranks = sorted(logs.ranks())
    if args.rank is not None and args.rank not in ranks:
        raise ConfigError(f"--rank {args.rank}: no such log; logs so far: {_listed(ranks)}")
    attempts = sorted(attempt_numbers(records_of(folder)).values())
    if args.attempt is not None and args.attempt not in attempts:
        raise ConfigError(f"--attempt {args.attempt}: no such attempt; attempts so far: {_listed(attempts)}")


def _never_comes(folder: RunDir, rank: int | None) -> bool:
    """Whether the attempt under way has fewer ranks."""
    now = records_of(folder)[-1:]
    return rank is not None and any(not record["reason"] and rank >= record["world_size"] for record in now)


class _Printer:
    """Selects lines as the options say, and prints them, each with its rank in front."""

    def __init__(self, run: RunDir, args: argparse.Namespace) -> None:
        self._run, self._args = run, args
        self._colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.hidden = self.printed = 0  # lines of the programs that start the ranks; lines printed

    def select(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines to print."""
        args = self._args
        numbers = attempt_numbers(records_of(self._run)) if args.attempt is not None else {}
        for line in lines:
            if args.attempt is not None and numbers.get(line.attempt) != args.attempt:
                continue
            if (args.since and line.at < args.since) or not self._matches(line):
                continue
            if self._is_hidden(line):
                self.hidden += 1
                continue
            yield line

    def wants(self, line: Line) -> bool:
        """Whether to print a line of any time and attempt."""
        return self._matches(line) and not self._is_hidden(line)

    def _matches(self, line: Line) -> bool:
        return self._args.grep is None or bool(self._args.grep.search(line.text))

    def _is_hidden(self, line: Line) -> bool:
        if self._args.all:
            return False
        everybody = self._args.rank is None and self._args.grep is None
        # That the other ranks begin, too, is news only in a log of their own.
        return bool(OF_OTHERS.match(line.text) or (everybody and line.rank and BEGINS.match(line.text.encode())))

    def print(self, lines: Iterable[Line]) -> None:
        """Print the lines, in colour on a terminal."""
        for line in lines:
            mark, text = f"{line.rank:>3} |", line.text
            if self._colour:
                mark = _coloured(mark, RANK_COLOURS[line.rank % len(RANK_COLOURS)])
                if ERROR.match(text):
                    text = _coloured(text, RED)
                elif WARNING.match(text):
                    text = _coloured(text, YELLOW)
            print(mark, text)
            self.printed += 1
        sys.stdout.flush()


def _last(lines: Iterator[Line], count: int | None) -> Iterable[Line]:
    return lines if count is None else deque(lines, maxlen=count)


def _coloured(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def _note(text: str) -> None:
    note(f"[laststep] {text}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a number of lines, such as 20")
    return int(text)


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text}: not a regular expression: {error}") from None


def _moment(text: str) -> float:
    """A time or a duration until now, as Unix seconds."""
    now = datetime.now()
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return (now - timedelta(**{UNITS[found[2]]: float(found[1])})).timestamp()
    with_date = "-" in text
    try:
        moment = datetime.fromisoformat(text if with_date else f"{now.date()}T{text.zfill(5)}")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: must be a time such as 14:30 or 2026-11-22T14:30, or a duration such as 10m"
        ) from None
    if not with_date and moment > now:
        moment -= timedelta(days=1)
    return moment.timestamp()


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:20])
    return f"{shown}{', ...' if len(numbers) > 20 else ''}" if numbers else "none"

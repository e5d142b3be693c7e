"""logs: what the ranks of a run printed, merged in time order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence

from trainer.cluster import run_folders
from trainer.cluster.merged_logs import Line, Logs, attempt_numbers
from trainer.cluster.run_status import StatusReader, records_of
from trainer.config.errors import ConfigError
from trainer.rundir import RunDir

POLL_S = 1.0
COLOURS = (36, 33, 35, 32, 34, 31)  # of the terminal (ECMA-48, SGR)


def logs(name: str, overrides: Sequence[str], rank: int | None, attempt: int | None, follow: bool) -> int:
    """Print the log of one rank or of all, of one attempt or of all; the exit status.

    Following ends with the run: 0 when it has finished, 1 when it ended otherwise.
    """
    run = run_folders.find(name, run_folders.root_of(overrides))
    files = Logs(run, rank)
    if rank is not None and rank not in files.ranks():
        raise ConfigError(f"--rank {rank}: no log of it; there are those of {_listed(sorted(files.ranks()), 'rank')}")
    numbers = attempt_numbers(records_of(run))
    if attempt is not None and attempt not in numbers.values():
        raise ConfigError(f"--attempt {attempt}: no such attempt; there are {_listed(sorted(numbers.values()), '')}")
    show = _Printer(run, attempt)
    if not follow:
        show(files.read(all_of_it=True))
        return 0
    lookout = StatusReader()
    while True:
        over = not (now := lookout.look([run])[0]).alive  # looked at first: what the run said last is read after it
        show(files.read(all_of_it=over))
        if over:
            print(f"[laststep] {run.name}: {now.state}{now.why and f', {now.why}'}", file=sys.stderr)
            return 0 if now.state == "finished" else 1
        time.sleep(POLL_S)


class _Printer:
    """Prints lines, each with its rank in front."""

    def __init__(self, run: RunDir, attempt: int | None) -> None:
        self._run, self._attempt = run, attempt
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, lines: Iterator[Line]) -> None:
        if self._attempt is not None:
            numbers = attempt_numbers(records_of(self._run))
            lines = (line for line in lines if numbers.get(line.attempt) == self._attempt)
        for line in lines:
            mark = f"{line.rank:>3} |"
            if self._colour:
                mark = f"\x1b[{COLOURS[line.rank % len(COLOURS)]}m{mark}\x1b[0m"
            print(mark, line.text)
        sys.stdout.flush()


def _listed(numbers: list[int], what: str) -> str:
    shown = ", ".join(f"{what} {number}".strip() for number in numbers[:20])
    return f"{shown}{', ...' if len(numbers) > 20 else ''}" if numbers else "none yet"

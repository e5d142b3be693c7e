"""The logs of all ranks of a run, merged in time order.

Each rank writes to a file of its own, through all restarts of a job. Laststep's and submitit's own lines carry a time;
any other line is taken to be as old as the last of these before it. The files may be larger than the memory, and more
than a process may have open: each is read by the block, and open only meanwhile.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.run_status import jobs_of
from trainer.records.attempt_record import AttemptRecord
from trainer.rundir import RunDir

OURS = re.compile(rb"\[laststep (\d\d):(\d\d):(\d\d)\] ")
BEGINS = re.compile(rb"\[laststep [\d:]+\] attempt begins on (\d+)-(\d\d)-(\d\d): rank .*, job (\S+), restart (\d+)\)")
SUBMITITS = re.compile(rb"submitit \w+ \((\d+)-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d),(\d+)\) - ")
STARTS = re.compile(SUBMITITS.pattern + rb"Starting with ")
DAY_S = 86400.0
NAME = re.compile(r"(.+)_(\d+)_log\.out")
BLOCK = 1 << 16  # bytes
LONGEST = 1 << 18  # bytes of a line; what has no end, such as a progress bar, is cut


@dataclass(frozen=True)
class Line:
    """One line of one rank's log, at a moment in Unix seconds; `attempt` is (job id, restart)."""

    at: float
    rank: int
    attempt: tuple[str, int]
    text: str


class _Tail:
    """What has been read of one rank's log."""

    def __init__(self, path: Path, job_id: str, rank: int) -> None:
        self._path, self._rank = path, rank
        self._offset = 0
        self._at = 0.0
        self._starts = 0
        self._attempt = (job_id, 0)

    def read(self, all_of_it: bool) -> Iterator[Line]:
        """The lines that are whole by now; with `all_of_it` what is left of a last one too."""
        return self._lines(self._path.stat().st_size, all_of_it)

    def _lines(self, end: int, all_of_it: bool) -> Iterator[Line]:
        while self._offset < end and (block := self._block(all_of_it)):
            yield from map(self._line, block.removesuffix(b"\n").split(b"\n"))

    def _block(self, all_of_it: bool) -> bytes:
        """The next lines."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(BLOCK)
            rest = file.readline(LONGEST)
        data += rest
        if not all_of_it and len(rest) < LONGEST:
            data = data[: data.rfind(b"\n") + 1]  # a half-written line is read again, when it is whole
        self._offset += len(data)
        return data

    def _line(self, raw: bytes) -> Line:
        if STARTS.match(raw):  # once in each start of the job, before a word of ours
            self._attempt = (self._attempt[0], self._starts)
            self._starts += 1
        self._clock(raw)
        return Line(self._at, self._rank, self._attempt, raw.rstrip(b"\r").decode(errors="replace"))

    def _clock(self, raw: bytes) -> None:
        if found := SUBMITITS.match(raw):
            *moment, ms = map(int, found.groups())
            self._at = _unix(*moment) + ms / 1000
        elif found := BEGINS.match(raw):
            year, month, day, job_id, restart = found.groups()
            self._attempt = (job_id.decode(), int(restart))
            self._at = _unix(int(year), int(month), int(day), 0, 0, 0)
        if found := OURS.match(raw):
            hour, minute, second = map(int, found.groups())
            today = time.localtime(self._at)
            at = _unix(*today[:3], hour, minute, second)
            while at < self._at - DAY_S / 2:  # past midnight
                at += DAY_S
            self._at = max(self._at, at)


class Logs:
    """The logs of a run, read on and on: new files are found as they come, by polling, which works over NFS."""

    def __init__(self, run: RunDir, rank: int | None = None) -> None:
        self._run = run
        self._rank = rank
        self._tails: dict[Path, _Tail] = {}

    def ranks(self) -> set[int]:
        """Ranks that have written anything."""
        return {rank for _, _, rank in self._files()}

    def read(self, all_of_it: bool) -> Iterator[Line]:
        """What is new since the last call, merged by time, each file's lines in their order; with `all_of_it` a
        half-written last line too. To be read to its end before the next call."""
        for path, job_id, rank in self._files():
            if path not in self._tails and self._rank in (None, rank):
                self._tails[path] = _Tail(path, job_id, rank)
        return heapq.merge(
            *[tail.read(all_of_it) for tail in self._tails.values()], key=lambda line: (line.at, line.rank)
        )

    def _files(self) -> Iterator[tuple[Path, str, int]]:
        """Path, job and rank of each log of this run: the runs of a sweep have theirs in one folder."""
        jobs = set(jobs_of(self._run))
        for path in self._run.logs.glob("*_log.out"):
            found = NAME.fullmatch(path.name)
            if found and found[1] in jobs:
                yield path, found[1], int(found[2])


def attempt_numbers(records: list[AttemptRecord]) -> dict[tuple[str, int], int]:
    """(job id, restart) of each attempt -> its number in attempts.jsonl."""
    return {(record["job_id"], record["restart"]): record["attempt"] for record in records}


def _unix(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float:
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))

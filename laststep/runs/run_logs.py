"""The logs of a run: rank 0's as it grows (`LiveLog`, under --local and --follow), `follow`, which stays through every
requeue until the run ends, and those of all ranks merged by time (`MergedLogs`).

A terminal gets a progress bar below the log, and at most a few progress lines a second: a fast run writes hundreds. A
pipe or a file gets every line and no bar.

Each rank writes a file of its own, through all restarts of a job. The lines of Laststep and submitit carry a time; any
other line gets the time of the last such line before it. The files may be larger than memory, and there may be more of
them than a process may open. So each is read in blocks, and is open only while a block is read.
"""

from __future__ import annotations

import contextlib
import heapq
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from laststep.ranks.slurm import is_job_id
from laststep.records.attempt_record import AttemptRecord, rank_in, read_ended_attempts, reason_in, users_line_in
from laststep.records.metrics import newest_step
from laststep.records.plan import read_plan
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs.pending import WaitReport
from laststep.runs.run_folders import short, typed
from laststep.runs.run_status import RunStatus, StatusReader, jobs_of, records_of, still_prints
from laststep.say import command, note

if TYPE_CHECKING:
    from submitit import SlurmJob

BAR_EVERY_S = 0.5  # between two updates of the bar
PROGRESS_EVERY_S = 0.25  # between two progress lines on a terminal
MAY_BE_DROPPED = (b"[", b"s")  # how a line begins that is a progress line, or one of OF_OTHERS
PROGRESS = re.compile(rb"\[laststep [\d:]+\] step \d+/\d+ ")
# What --follow and `logs` leave out: lines of the programs that start the ranks, and of ranks that have lost another
# one, of which the record says more. A process that ran out of memory is worth a line: nothing else shows it.
OF_OTHERS = re.compile(
    r"submitit \w+ \(\d{4}-|(srun|slurmstepd)(-\S+)?: (?!.*(oom|out of memory))"
    r"|\[laststep [\d:]+\] rank \d+ on \S+ lost contact: "
    r"|\[rank\d+\]:\[W\S+ \S+ (TCPStore|ProcessGroup)\w*\.cpp|Exception raised from recvBytes at |<omitting python "
    r"frames>|frame #\d+: .*\(0x",
    re.IGNORECASE,
)
# What a progress line leaves out on a narrow terminal, in this order. The bar below it shows most of it.
GIVES_WAY = (b" left", b" samples/s", b"grad norm ", b"epoch ", b"lr ")


class LiveLog:
    """Prints what rank 0 of a run writes to its log, and shows how far the run is. The error that ends the last attempt
    comes at the end, unless `take_error` leaves it to `print_cause`."""

    def __init__(self, run: RunDir, log: Path) -> None:
        self._run, self._log = run, log
        self._offset = 0  # bytes of the log that were read
        self._bar_updated_at = 0.0
        self._bar = None
        self._filter = LogFilter()
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._filter = LogFilter(lambda: shutil.get_terminal_size().columns)

    def __enter__(self) -> LiveLog:
        if self._bar:
            self._bar.start()
        return self

    def turn_to(self, log: Path) -> None:
        """From now on this log: the run continues in another job, see launch.chain."""
        if log != self._log:
            self.update()
            self._log, self._offset = log, 0

    def take_error(self) -> str:
        """The lines of that error; empty where there is none."""
        error = b"".join(self._filter.error).decode(errors="replace")
        self._filter.error.clear()
        return error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _print(self._filter.rest())
        if self._bar:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def update(self) -> None:
        """Print the new lines of the log, `error: ...` lines to stderr, and move the bar. What the disk does not show
        right now comes with a later update."""
        with contextlib.suppress(OSError):
            self._update()

    def _update(self) -> None:
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            self._offset += len(data)
            _print(self._filter.pass_on(data, time.monotonic()))
        if self._bar and time.monotonic() > self._bar_updated_at + BAR_EVERY_S:
            self._bar_updated_at = time.monotonic()
            plan = read_plan(self._run.plan)
            step = newest_step(self._run.metrics)
            if step:
                loss = ""
                if "loss" in step:
                    loss = "loss not finite  " if step["loss"] is None else f"loss {step['loss']:.4f}  "
                text = f"epoch {step['epoch']}  {loss}{step['samples_per_s']:,.0f} samples/s"
                total = plan["total_steps"] if plan else None
                self._bar.update(self._task, completed=step["step"], total=total, description=text)


class LogFilter:
    """Drops the lines that are `OF_OTHERS`. For a terminal, which is `columns` wide, it also drops progress lines
    ("step N/M ...") that follow each other too fast.

    The newest progress line is held back until it is due. It is printed sooner when any other line follows, so that
    the lines stay in order, and at the end, so that the last one is always seen. A line that is wider than the
    terminal is shortened. The `error` of a rank is held back until another one or another attempt follows,
    or any line where it explains itself in one.
    """

    def __init__(self, columns: Callable[[], int] | None = None) -> None:
        self._columns = columns
        self._partial = b""  # the beginning of a line that may become one to drop
        self._held = b""  # the newest progress line, if it was not printed
        self._printed_at = -PROGRESS_EVERY_S
        self.error: list[bytes] = []
        self._in_error = False
        self._one_line = b""  # an error that explains itself, if that is the last line so far

    def pass_on(self, data: bytes, now: float) -> Iterator[bytes]:
        """The lines to print, given what the log has gained since the last call; `now` is in seconds."""
        lines = (self._partial + data).splitlines(keepends=True)
        self._partial = b""
        if lines and lines[-1].startswith(MAY_BE_DROPPED) and not lines[-1].endswith(b"\n"):
            self._partial = lines.pop()
        for line in lines:
            if OF_OTHERS.match(line.decode(errors="replace")):
                continue
            if FAILED.match(line) or BEGINS.match(line) or self.error[:1] == [self._one_line]:
                yield from self.error
                self.error.clear()
            if self._columns is not None and PROGRESS.match(line):
                self._held = line
                continue
            yield from self._release(now)
            self._one_line = line if line.startswith(b"error: ") else b""
            self._in_error = bool(FAILED.match(line) or (self._in_error and not OURS.match(line)))
            if self._in_error or self._one_line:
                self.error.append(line)
            else:
                yield line
        if now >= self._printed_at + PROGRESS_EVERY_S:
            yield from self._release(now)

    def rest(self) -> list[bytes]:
        """What is still held back, at the end of the run."""
        rest = [*self._release(now=0.0), *self.error, *([self._partial] if self._partial else [])]
        self._partial = b""
        self.error.clear()
        return rest

    def _release(self, now: float) -> Iterator[bytes]:
        if self._held and self._columns is not None:
            line, self._held, self._printed_at = self._held, b"", now
            yield fitted(line, self._columns())


def fitted(line: bytes, columns: int) -> bytes:
    """A progress line without the fields that have no room in a terminal of this width."""
    fields = line.rstrip(b"\n").split(b"  ")
    for unit in GIVES_WAY:
        if len(b"  ".join(fields)) <= columns:
            break
        fields = [field for field in fields if unit not in field]
    return b"  ".join(fields) + b"\n"


def _print(lines: Iterable[bytes]) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone; the log file is not
        for line in lines:
            stream = sys.stderr if line.startswith(b"error: ") else sys.stdout
            stream.write(line.decode(errors="replace"))
            stream.flush()


POLL_S = 0.5


def follow(run: RunDir, job: SlurmJob[dict[str, float]]) -> int:
    """Stay until the run ends; returns the exit status. Ctrl-C leaves the job alone."""
    reader = StatusReader()
    waiting = WaitReport(lambda text: note(f"[laststep] {text}"))
    chains = {line["job_id"]: line.get("chain") for line in read_submissions(run.submissions)}
    chain = chains.get(job.job_id)
    try:
        with LiveLog(run, job.paths.stdout) as log:
            while True:
                # Status before log: once the run has ended, this update prints its last lines.
                (status,) = reader.read([run])
                ended = not status.alive and not still_prints(run)
                for record in records_of(run)[-1:]:
                    if chain is not None and record["chain"] == chain:
                        log.turn_to(run.logs / f"{record['job_id']}_0_log.out")
                log.update()
                if ended:
                    error = log.take_error() if status.state in ("failed", "lost") else ""
                    break
                waiting.update(status)
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        to_end = command(f"cancel {typed(run)}")
        note(f"\n[laststep] {run.name} is still running; to end it: `{to_end}`")
        return 130
    if status.state == "finished":
        return 0
    note(f"[laststep] {_how_it_ended(run, status)}")
    if status.state in ("failed", "lost"):
        print_cause(run, in_log=error)
    else:
        note(f"next   {command(f'resume {typed(run)}')}")
    return 1


def print_cause(run: RunDir, local: bool = False, in_log: str = "") -> None:
    """The last lines of a command whose run has failed: the first error of its last attempt, where in the user's code
    that is, and what to type next. Above them are the logs, in which other ranks complain of the one that failed.
    `local`: the run is to continue on this machine. `in_log`: the error as `LiveLog` has held it back."""
    jobs = jobs_of(run)
    # Of another job, its ranks ended before they began; but a chain has jobs that have not.
    ended = [
        record
        for record in read_ended_attempts(run.attempts)[-1:]
        if record["job_id"] == jobs[-1] or record["chain"] is not None
    ]
    error = ended[0]["error"] if ended else None
    reason = reason_in(error)
    before, found, after = in_log.rpartition(f"\n{reason}\n")
    if in_log == f"error: {reason}\n":
        in_log = ""
    elif reason and found:  # said below: of a traceback, print all but this line
        in_log = f"{before}\n{after}" if "\n" in before else after
    print(in_log, end="", file=sys.stderr)
    if reason:
        rank = rank_in(error)
        note(f"error  {rank}: {reason}" if rank else f"error  {reason}", indent=7)
    if line := users_line_in(error):
        note(f"at     {line}", indent=7)
    here = " --local" if local or not any(map(is_job_id, jobs)) else ""
    note(f"next   {command(f'resume {typed(run)}{here}')}")
    note(f"debug  {command(f'resume {typed(run)} --debug')}")


def _how_it_ended(run: RunDir, status: RunStatus) -> str:
    why = f" ({status.why})" if status.why else ""
    if status.state in ("failed", "lost"):  # why: see `print_cause`
        return f"the run ended: {status.state}; the ranks' logs are in {short(run.logs)}"
    return f"job {status.job_id} left the queue before the run finished{why}"


OURS = re.compile(rb"\[laststep (\d\d):(\d\d):(\d\d)\] ")
FAILED = re.compile(OURS.pattern + rb"rank \d+ on \S+ failed:\n")
BEGINS = re.compile(rb"\[laststep [\d:]+\] attempt begins on (\d+)-(\d\d)-(\d\d): rank ")
SUBMITITS = re.compile(rb"submitit \w+ \((\d+)-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d),(\d+)\) - ")
STARTS = re.compile(SUBMITITS.pattern + rb"Starting with ")
DAY_S = 86400.0
CLOCKS_DIFFER_S = 3600.0  # at most: a rank's, and that of the file system
NAME = re.compile(r"(.+)_(\d+)_log\.out")
BLOCK = 1 << 16  # bytes
LONGEST_LINE = 1 << 18  # bytes; a longer one, such as a progress bar without line ends, is cut


@dataclass(frozen=True)
class Line:
    """One line of one rank's log. `at` is in Unix seconds, `attempt` is (job id, how often the job's ranks had started
    before)."""

    at: float
    rank: int
    attempt: tuple[str, int]
    text: str


class _RankLog:
    """One rank's log, and how far it has been read."""

    def __init__(self, path: Path, job_id: str, rank: int) -> None:
        self._path, self._rank = path, rank
        self._offset = 0
        self._at = 0.0
        self._job_id = job_id
        self._starts = 0
        self._starting = False  # submitit has said that this rank starts, and no attempt has begun since

    def skip(self, size: int) -> bool:
        """Leave out all but about the last `size` bytes, and with them the number of the attempt; returns whether there
        is anything to leave out."""
        found = self._path.stat()
        start = max(0, found.st_size - size)
        if start:
            with self._path.open("rb") as file:
                file.seek(start)
                self._offset = start + len(file.readline())
                self._at = _first_time(file.read(size), found.st_mtime)
        return start > 0

    def read(self, whole: bool) -> Iterator[Line]:
        """The new complete lines; if the log is `whole`, an unterminated last line too."""
        end = self._path.stat().st_size
        while self._offset < end and (block := self._block(whole)):
            for raw in block.removesuffix(b"\n").split(b"\n"):
                self._clock(raw)
                attempt = (self._job_id, max(0, self._starts - 1))
                yield Line(self._at, self._rank, attempt, raw.rstrip(b"\r").decode(errors="replace"))

    def _block(self, whole: bool) -> bytes:
        """The next lines."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(BLOCK)
            rest = file.readline(LONGEST_LINE)
        data += rest
        if not whole and len(rest) < LONGEST_LINE:
            data = data[: data.rfind(b"\n") + 1]  # a half-written line is read again once it is complete
        self._offset += len(data)
        return data

    def _clock(self, raw: bytes) -> None:
        if found := SUBMITITS.match(raw):
            *moment, ms = map(int, found.groups())
            self._at = _unix(*moment) + ms / 1000
            if STARTS.match(raw):  # once per start, before any line of ours
                self._starts, self._starting = self._starts + 1, True
        elif found := BEGINS.match(raw):
            if not self._starting:  # without submitit, as under --local
                self._starts += 1
            self._starting = False
            year, month, day = map(int, found.groups())
            self._at = _unix(year, month, day, 0, 0, 0)
        if found := OURS.match(raw):
            hour, minute, second = map(int, found.groups())
            today = time.localtime(self._at)
            at = _unix(*today[:3], hour, minute, second)
            while at < self._at - DAY_S / 2:  # past midnight
                at += DAY_S
            self._at = max(self._at, at)


class MergedLogs:
    """The logs of a run, to be read repeatedly. New files are found by polling, which works over NFS."""

    def __init__(self, run: RunDir, rank: int | None = None) -> None:
        self._run = run
        self._rank = rank
        self._logs: dict[Path, _RankLog] = {}

    def ranks(self) -> set[int]:
        """The ranks that have a log."""
        return {rank for _, _, rank in self._files()}

    def skip_to_last(self, count: int, wanted: Callable[[Line], bool]) -> None:
        """Before the first `read`: skip what precedes the last `count` wanted lines of each log, or some of it. The
        attempts of the lines are unknown from then on."""
        for path, job_id, rank in self._files():
            size, has_more = BLOCK, True
            while has_more and self._rank in (None, rank):
                log, probe = _RankLog(path, job_id, rank), _RankLog(path, job_id, rank)
                has_more = log.skip(size) and probe.skip(size) and sum(map(wanted, probe.read(whole=True))) < count
                self._logs[path] = log
                size *= 8

    def read(self, whole: bool) -> Iterator[Line]:
        """The lines that are new since the last call, merged by time; each file's lines keep their order.

        `whole` says that nothing more will be written, so that an unterminated last line is included. Exhaust the
        iterator before the next call.
        """
        for path, job_id, rank in self._files():
            if path not in self._logs and self._rank in (None, rank):
                self._logs[path] = _RankLog(path, job_id, rank)
        return heapq.merge(*[log.read(whole) for log in self._logs.values()], key=lambda line: (line.at, line.rank))

    def _files(self) -> Iterator[tuple[Path, str, int]]:
        """Path, job and rank of each log of this run. The runs of a sweep share one folder of logs."""
        jobs = set(jobs_of(self._run))
        for path in self._run.logs.glob("*_log.out"):
            found = NAME.fullmatch(path.name)
            if found and found[1] in jobs:
                yield path, found[1], int(found[2])


def attempt_numbers(records: list[AttemptRecord]) -> dict[tuple[str, int], int]:
    """For each attempt its job, and how many of that job's were before it -> its number in attempts.jsonl."""
    of_job: dict[str, list[int]] = {}
    for record in records:
        of_job.setdefault(record["job_id"], []).append(record["attempt"])
    return {(job, count): number for job, numbers in of_job.items() for count, number in enumerate(numbers)}


def _first_time(text: bytes, written_at: float) -> float:
    """When the first of our lines in the end of a log was written, in Unix seconds, given when the last one was."""
    at = written_at
    for found in reversed(re.findall(rb"^" + OURS.pattern, text, re.MULTILINE)):
        moment = _unix(*time.localtime(at)[:3], *map(int, found))
        at = moment - DAY_S if moment > at + CLOCKS_DIFFER_S else moment
    return at


def _unix(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float:
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))

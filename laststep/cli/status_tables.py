"""What `status` draws: tables no wider than the terminal, as lines of text, and --watch, which redraws them as the runs
change, with a key to scroll where not all fit.

rich draws each line. Which columns and cells give way on a narrow terminal is decided here: rich would shrink all
columns alike, or fold a cell. Neither does its Live read keys.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import textwrap
import threading
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.control import Control
from rich.text import Text

from laststep import rooms
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.job.nodes import left_nodes
from laststep.ranks.slurm import is_job_id
from laststep.records.attempt_record import AttemptRecord, reason_in, start_of
from laststep.records.metrics import damaged_lines, metrics_in, newest_epoch
from laststep.records.progress import duration
from laststep.rundir import RunDir
from laststep.runs.pending import Pending, when
from laststep.runs.run_status import STATES, RunStatus, records_of, settled, time_of

COLOURS = {
    "running": "green",
    "starting": "yellow",
    "restarting": "yellow",
    "stopping": "yellow",
    "requeued": "yellow",
    "queued": "cyan",
    "finished": "bold green",
    "failed": "bold red",
    "lost": "bold red",
    "unknown": "magenta",
}
MODULE = re.compile(r"^(\w+\.)+(?=[A-Z]\w*:)")  # of an exception; there is more to say where room is scarce
HALF_A_YEAR_S = 182 * 86400.0
FAILED_RANK = re.compile(r"(rank (\d+) on \S+) failed:")  # the first line of an attempt's error
GAP = 2  # columns of the terminal between two of the table
READ_EVERY_S = 2.0
DRAW_EVERY_S = 1.0  # for the clock, and for a terminal that changes its size
STALE_S = 10.0  # mark a reading that is older than this
HINT = "arrows scroll, q ends"
KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
QUIT = (b"q", b"Q")
# Keys that scroll, and which way: by a line, by a page, or to an end.
BY_LINE = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1}
BY_PAGE = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1}
TO_END = {b"\x1b[H": -1, b"\x1bOH": -1, b"\x1b[1~": -1, b"g": -1, b"\x1b[F": 1, b"\x1bOF": 1, b"\x1b[4~": 1, b"G": 1}
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """One column: its title, and a cell for each row.

    `gives_way`: the column with the lowest number is left out first; None: never. `least`: the width to which its cells
    may be cut when that is not enough; None: they are never cut. `cut_middle`: a cut cell keeps its end too.
    """

    title: str
    cells: Sequence[Text]
    left: bool = False  # aligned
    gives_way: int | None = None
    least: int | None = None
    cut_middle: bool = False

    @cached_property
    def width(self) -> int:
        """Wide enough for the title and every cell."""
        return max(len(self.title), *(cell.cell_len for cell in self.cells), 0)

    @property
    def least_width(self) -> int:
        """Its width once it is cut as far as it may be."""
        return self.width if self.least is None else min(self.width, max(self.least, len(self.title)))


class FittedTable:
    """The columns that fit into `width` (None: all of them), a line of text per row. Empty columns are left out."""

    def __init__(self, columns: Sequence[Column], width: int | None) -> None:
        self._columns = [column for column in columns if any(column.cells)]
        self._rows = len(columns[0].cells)
        if width is not None:
            self._leave_out(width)
        self._widths = [column.width for column in self._columns]
        if width is not None:
            self._cut(width)

    @property
    def header(self) -> Text:
        """The line of titles."""
        return self._line([Text(column.title) for column in self._columns], "bold")

    def rows(self) -> list[Text]:
        """A line per row."""
        return [self._line([column.cells[row] for column in self._columns]) for row in range(self._rows)]

    def _leave_out(self, width: int) -> None:
        while _total([column.least_width for column in self._columns]) > width:
            optional = [column for column in self._columns if column.gives_way is not None]
            if not optional:
                break
            self._columns.remove(min(optional, key=lambda column: column.gives_way or 0))

    def _cut(self, width: int) -> None:
        """Cut cells, those of the last column first. On a very narrow terminal the first column gives all the rest."""
        for number, column in reversed(list(enumerate(self._columns))):
            too_wide = max(0, _total(self._widths) - width)
            self._widths[number] -= min(too_wide, column.width - column.least_width)
        self._widths[0] = max(1, self._widths[0] - max(0, _total(self._widths) - width))

    def _line(self, cells: Sequence[Text], style: str = "") -> Text:
        line = Text(style=style, no_wrap=True, overflow="crop")
        for number, (cell, column, width) in enumerate(zip(cells, self._columns, self._widths)):
            if cell.cell_len > width:
                cell = _shortened(cell, width, column.cut_middle)
            gap, space = " " * GAP * bool(number), " " * (width - cell.cell_len)
            line.append(gap + space * (not column.left)).append_text(cell).append(space * column.left)
        line.rstrip()
        return line


@dataclass(frozen=True)
class View:
    """What status shows: a header, the rows below it, how many more there are, and the totals. A text is a line."""

    header: Sequence[Text]
    rows: Sequence[Text]
    more: int = 0
    totals: Text | None = None

    def __rich__(self) -> Text:
        """All of it, from top to bottom."""
        below = [Text(f"... {self.more:,} more", "dim")] if self.more else []
        return Text("\n").join([*self.header, *self.rows, *below, *([self.totals] if self.totals else [])])


def _progress(runs: Sequence[RunStatus], least: int) -> list[Column]:
    """How far the runs are."""
    return [
        _column("run", [run.run for run in runs], left=True, least=least, cut_middle=True),
        Column("state", [_state(run.state) for run in runs], left=True),
        _column("step", [_of(run.step, run.total_steps) for run in runs], gives_way=8),
        _column("epoch", [or_dash(run.epoch) for run in runs], gives_way=5),
        _column("loss", [number(run.loss) for run in runs], gives_way=6),
        _column("left", ["-" if run.eta_s is None else duration(run.eta_s) for run in runs], gives_way=7),
        _column("samples/s", [or_dash(run.samples_per_s, "{:,.0f}") for run in runs], gives_way=3),
    ]


def _history(runs: Sequence[RunStatus], least: int) -> list[Column]:
    """What it has taken so far, and what they wait for or died of."""
    return [
        _column("attempts", [str(run.attempts) for run in runs], gives_way=1),
        _column("lost", [str(run.lost_steps) for run in runs], gives_way=2),
        _column("goodput", [or_dash(run.goodput, "{:.0%}") for run in runs], gives_way=0),
        _column("job", [_job(run.job_id) if run.job_id and run.alive else "" for run in runs], gives_way=4),
        Column("", [Text(_note(run), "dim") for run in runs], left=True, gives_way=9, least=least),
    ]


def _of_rooms(runs: Sequence[RunStatus]) -> list[Column]:
    """A column for each cell that a room has for one of the runs that train."""
    cells = [rooms.told("cells", RunDir(run.folder)) if run.state == "running" else {} for run in runs]
    titles = dict.fromkeys(title for each in cells for title in each)
    return [_column(title, [each.get(title, "") for each in cells], gives_way=3) for title in titles]


def table_view(
    found: Sequence[RunStatus],
    wanted: Sequence[RunStatus],
    more: int,
    width: int | None,
    columns: Mapping[str, Mapping[str, str]],
) -> View:
    """The table of the wanted runs, and how many of all that were found are in each state.

    `columns` holds further columns by title: a cell for each run, by its name.
    """
    if not wanted:
        return View([], [Text("no run is in this state")], 0, _totals(found))
    least = (width or 0) // 4
    progress = _progress(wanted, least)
    further = [_column(title, [cells[run.run] for run in wanted], gives_way=10) for title, cells in columns.items()]
    table = FittedTable([*progress[:2], *further, *progress[2:], *_of_rooms(wanted), *_history(wanted, least)], width)
    return View([table.header], table.rows(), more, _totals(found))


def _totals(runs: Sequence[RunStatus]) -> Text:
    """3 running, 996 queued."""
    count = Counter(run.state for run in runs)
    plain = [state for state in STATES if state not in COLOURS]
    return Text(", ").join(_state(state, f"{count[state]:,} ") for state in (*COLOURS, *plain) if count[state])


def run_view(run: RunDir, status: RunStatus, pending: Pending | None, width: int | None) -> View:
    """One run: its row, why it waits, its measures and files, damage in these, its attempts with the reason of each
    failure."""
    records = settled(run, records_of(run), status.alive)
    table = FittedTable(_progress([status], 0), width)
    lines = [table.header, *table.rows(), Text()]
    for name, fact in _facts(run, status, records, pending).items():
        lines += _folded(f"{name:<13}", fact, width)
    for path in (run.attempts, run.metrics):
        if count := damaged_lines(path):
            lines.append(Text(f"{path.name}: damaged, {count} line{'s' * (count > 1)} skipped", "yellow"))
    if records:
        lines += [Text(), *_attempts(records, status.state, width, counts_steps=not run.progress.exists())]
    return View([], lines)


def _facts(run: RunDir, status: RunStatus, records: Sequence[AttemptRecord], pending: Pending | None) -> dict[str, str]:
    """What a run's own view shows besides its row, by name."""
    facts = {"job": status.job_id or "", "reason": status.why}
    if records and status.why == reason_in(records[-1]["error"]):
        del facts["reason"]  # the attempt shows it
    starts_at = status.starts_at
    if pending is not None:
        facts["reason"], starts_at = pending.why, pending.starts_at
    if starts_at:
        facts["starts"] = f"{_clock(starts_at)}, as Slurm expects"
    if pending is not None and pending.sooner:
        facts["sooner"] = "; ".join(f"{one.change}: {when(one.starts_at)}" for one in pending.sooner)
        facts["sooner"] += f" (`cancel {run.name}`, then `resume {run.name}` with it)"
    if status.started_at:
        facts["started"] = f"{_clock(status.started_at)}, {duration(time.time() - status.started_at)} ago"
        lost = f"{status.lost_steps or 'no'} step{'s' * (status.lost_steps > 1)} lost"
        if run.progress.exists():  # nothing is known of its steps
            facts["attempts"] = str(status.attempts)
        else:
            facts["attempts"] = f"{status.attempts}, {lost}"  # without goodput, which would contradict `time`
            facts["time"] = str(time_of(status))
        facts["GPU hours" if _on_gpus(run) else "rank hours"] = f"{status.rank_hours:,.2f}"
    facts |= rooms.told("facts", run)
    facts["excludes"] = _excluded(run, records)
    if epoch := newest_epoch(run.metrics):
        facts[f"epoch {epoch['epoch']}"] = ", ".join(f"{name} {number(epoch[name])}" for name in metrics_in(epoch))
    facts |= rooms.told("links", run)
    facts["folder"] = str(run.path)
    if log := _log(run, status, records):
        facts["log"] = log
    return {name: fact for name, fact in facts.items() if fact}


def _attempts(records: Sequence[AttemptRecord], state: str, width: int | None, counts_steps: bool) -> Iterator[Text]:
    """A row per attempt, and below it the reason if it failed. `state` is the run's, and that of an attempt without an
    end."""
    lasted = [(record["end"] or time.time()) - record["start"] for record in records]
    ids = [_job(record["job_id"]) + start_of(record) for record in records]
    jobs = [job + f" (restart {r['restart']})" * bool(r["restart"]) for job, r in zip(ids, records)]
    steps = [f"{r['start_step']} to {r['end_step']}" if r["reason"] else f"from {r['start_step']}" for r in records]
    table = FittedTable(
        [
            _column("attempt", [str(record["attempt"]) for record in records]),
            Column("state", [_state(record["reason"] or state) for record in records], left=True),
            _column("steps", [step * counts_steps for step in steps]),
            _column("lost", [str(record["lost_steps"]) * counts_steps for record in records], gives_way=3),
            _column("began", [_clock(record["start"]) for record in records], gives_way=2),
            _column("lasted", [duration(seconds) for seconds in lasted], gives_way=4),
            _column("job", jobs, gives_way=0),
            _column("ranks", [str(record["world_size"]) for record in records], gives_way=1),
            _column("hosts", [", ".join(record["hosts"]) for record in records], left=True, gives_way=5, least=8),
        ],
        width,
    )
    yield table.header
    for record, row in zip(records, table.rows()):
        yield row
        if reason := reason_in(record["error"]):
            failed = FAILED_RANK.match(record["error"] or "")
            yield from _folded(" " * len("attempt  "), f"{failed[1]}: {reason}" if failed else reason, width, "red")


def _folded(start: str, text: str, width: int | None, style: str = "") -> list[Text]:
    """The text after `start`, in as many lines as it takes. A word that is too long for a line, such as a path, is
    kept."""
    wrap = textwrap.TextWrapper(max(20, (width or 0) - len(start)), break_long_words=False, break_on_hyphens=False)
    pieces = [text] if width is None else wrap.wrap(text)
    starts = [start, *[" " * len(start)] * (len(pieces) - 1)]
    return [Text(before, "dim").append(piece, style or "not dim") for before, piece in zip(starts, pieces)]


def _log(run: RunDir, status: RunStatus, records: Sequence[AttemptRecord]) -> str:
    """The path of the log to read: of the rank that failed last, else of rank 0."""
    newest = records[-1] if records else None
    failed = FAILED_RANK.match(newest["error"] or "") if newest else None
    path = run.logs / f"{newest['job_id'] if newest else status.job_id}_{failed[2] if failed else 0}_log.out"
    return str(path) if path.exists() else ""


def _on_gpus(run: RunDir) -> bool:
    with contextlib.suppress(ConfigError):  # written by an older version
        config = Config.load(run.config)
        return config.device == "cuda" or bool(config.launch.gpus)
    return False


def _excluded(run: RunDir, records: Sequence[AttemptRecord]) -> str:
    """The nodes that the run leaves."""
    if any(record["blamed"] for record in records):
        with contextlib.suppress(ConfigError):  # written by an older version
            return left_nodes(records, Config.load(run.config).launch)
    return ""


def _note(run: RunStatus) -> str:
    expected = f"starts {_clock(run.starts_at)}" if run.starts_at else ""
    return ", ".join(filter(None, (expected, MODULE.sub("", run.why))))


def _column(title: str, cells: Sequence[str], **more: Any) -> Column:
    return Column(title, [Text(cell) for cell in cells], **more)


def _state(state: str, before: str = "") -> Text:
    return Text(before + state, COLOURS.get(state, ""))


def _job(job_id: str) -> str:
    """Slurm's id; `local` without a job, whose name would be long."""
    return job_id if is_job_id(job_id) else job_id.partition("-")[0]


def _of(step: int | None, total: int | None) -> str:
    return "-" if step is None else f"{step}/{total}" if total else str(step)


def or_dash(value: float | None, form: str = "{}") -> str:
    """The formatted value, or a dash for None."""
    return "-" if value is None else form.format(value)


def number(value: object) -> str:
    """A metric with four digits after the point, or four significant ones where it is small or large; else as it is."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


def _clock(at: float) -> str:
    """Local time; with the date if that is not today, with the year if that is far away. `at` is in Unix seconds."""
    moment, today = time.localtime(at), time.localtime()
    if moment[:3] == today[:3]:
        return time.strftime("%H:%M:%S", moment)
    return time.strftime("%b %d %H:%M" if abs(at - time.time()) < HALF_A_YEAR_S else "%Y-%m-%d", moment)


def _shortened(cell: Text, width: int, middle: bool) -> Text:
    end = Text("")
    if middle and width > 2:
        end = cell[-((width - 1) // 2) :]
    cell = cell.copy()
    cell.truncate(width - end.cell_len, overflow="ellipsis")
    return cell.append_text(end)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def watch(read: Callable[[], T], draw: Callable[[T, int], View]) -> None:
    """Redraw the terminal until q or Ctrl-C; then leave the last view there. Raises what `read` raises."""
    readings = _Readings(read)
    console = Console()
    window = _Window()
    drawn: tuple[T, int] | None = None
    try:
        with _keys() as pressed, console.screen() as screen:
            while True:
                if drawn is None or drawn[0] is not readings.newest() or drawn[1] != console.width:
                    drawn = readings.newest(), console.width
                    view = draw(*drawn)
                window.show(view, console.height, readings.age_s())
                console.control(Control.home())
                screen.update(Text("\n", no_wrap=True, overflow="crop").join([*window.lines, window.footer(HINT)]))
                for key in pressed(DRAW_EVERY_S):
                    if key in QUIT:
                        return
                    window.scroll(key)
    finally:
        if window.lines:
            console.print(Text("\n").join([*window.lines, *filter(None, [window.footer()])]), soft_wrap=True)


class _Window:
    """The part of a view that the terminal has room for: a clock and the totals, the header, and some of the rows."""

    def __init__(self) -> None:
        self.lines: list[Text] = []
        self._top = self._room = self._rows = self._more = 0

    def show(self, view: View, height: int, age_s: float) -> None:
        """Show the part of the view that `scroll` has led to."""
        clock = Text(time.strftime("%H:%M:%S"), "bold")
        if view.totals:
            clock.append("  ").append_text(view.totals)
        if age_s > STALE_S:
            clock.append(f"  as of {duration(age_s)} ago", "yellow")
        top = [clock, Text(), *view.header]
        self._rows, self._more, self._room = len(view.rows), view.more, max(1, height - len(top) - 1)
        self._to(self._top)
        self.lines = [*top, *view.rows[self._top : self._top + self._room]]

    def footer(self, hint: str = "") -> Text:
        """How many rows are above and below, and the hint."""
        below = max(0, self._rows - self._top - self._room) + self._more
        parts = [f"... {self._top:,} above"] if self._top else []
        parts += [f"... {below:,} more"] if below else []
        return Text("   ".join(filter(None, (*parts, hint))), "dim", no_wrap=True)

    def scroll(self, key: bytes) -> None:
        """Move by what a key asks for; other keys do nothing."""
        self._to(self._top + BY_LINE.get(key, 0) + self._room * BY_PAGE.get(key, 0) + self._rows * TO_END.get(key, 0))

    def _to(self, top: int) -> None:
        self._top = max(0, min(top, self._rows - self._room))


class _Readings(Generic[T]):
    """Reads again and again in a thread of its own, so that keys are answered while Slurm or a disk is slow."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read, self._newest, self._at = read, read(), time.monotonic()
        self._error: Exception | None = None
        threading.Thread(target=self._keep_reading, daemon=True).start()

    def newest(self) -> T:
        """The newest reading. Raises what `read` has raised since."""
        if self._error:
            raise self._error
        return self._newest

    def age_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._at

    def _keep_reading(self) -> None:
        try:
            while True:
                time.sleep(READ_EVERY_S)
                self._newest = self._read()
                self._at = time.monotonic()
        except Exception as error:
            self._error = error


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[bytes]]]:
    """A function that returns the keys pressed on the terminal, or none after this many seconds."""
    if not sys.stdin.isatty():  # only Ctrl-C ends it

        def wait(seconds: float) -> list[bytes]:
            time.sleep(seconds)
            return []

        yield wait
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> list[bytes]:
        if not select.select([terminal], [], [], seconds)[0]:
            return []
        return KEY.findall(os.read(terminal, 1024)) or [QUIT[0]]  # nothing to read: the terminal is gone

    try:
        tty.setcbreak(terminal)  # each key at once and unseen; Ctrl-C remains a signal
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)

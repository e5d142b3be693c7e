"""The tables that status draws, as lines of text no wider than the terminal."""

from __future__ import annotations

import contextlib
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from laststep.cli.fitted_table import Column, FittedTable
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.job.nodes import left_nodes
from laststep.observe.progress import duration
from laststep.ranks.slurm import is_job_id
from laststep.records.attempt_record import AttemptRecord, reason_in, start_of
from laststep.records.metrics import damaged_lines, metrics_in, newest_epoch
from laststep.rundir import RunDir
from laststep.runs.run_status import STATES, RunStatus, records_of, time_of

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
    table = FittedTable([*progress[:2], *further, *progress[2:], *_history(wanted, least)], width)
    return View([table.header], table.rows(), more, _totals(found))


def _totals(runs: Sequence[RunStatus]) -> Text:
    """3 running, 996 queued."""
    count = Counter(run.state for run in runs)
    plain = [state for state in STATES if state not in COLOURS]
    return Text(", ").join(_state(state, f"{count[state]:,} ") for state in (*COLOURS, *plain) if count[state])


def run_view(run: RunDir, status: RunStatus, width: int | None) -> View:
    """One run: its row, its measures and files, damage in these, and its attempts with the reason of each failure."""
    records = records_of(run)
    table = FittedTable(_progress([status], 0), width)
    lines = [table.header, *table.rows(), Text()]
    for name, fact in _facts(run, status, records).items():
        lines += _folded(f"{name:<13}", fact, width)
    for path in (run.attempts, run.metrics):
        if count := damaged_lines(path):
            lines.append(Text(f"{path.name}: damaged, {count} line{'s' * (count > 1)} skipped", "yellow"))
    if records:
        lines += [Text(), *_attempts(records, status.state, width)]
    return View([], lines)


def _facts(run: RunDir, status: RunStatus, records: Sequence[AttemptRecord]) -> dict[str, str]:
    """What a run's own view shows besides its row, by name."""
    facts = {"job": status.job_id or "", "reason": status.why}
    if records and status.why == reason_in(records[-1]["error"]):
        del facts["reason"]  # the attempt shows it
    if status.starts_at:
        facts["starts"] = f"{_clock(status.starts_at)}, as Slurm expects"
    if status.started_at:
        facts["started"] = f"{_clock(status.started_at)}, {duration(time.time() - status.started_at)} ago"
        lost = f"{status.lost_steps or 'no'} step{'s' * (status.lost_steps > 1)} lost"
        facts["attempts"] = f"{status.attempts}, {lost}, goodput {or_dash(status.goodput, '{:.0%}')}"
        facts["time"] = str(time_of(status))
        facts["GPU hours" if _on_gpus(run) else "rank hours"] = f"{status.rank_hours:,.2f}"
    facts["excludes"] = _excluded(run, records)
    if epoch := newest_epoch(run.metrics):
        facts[f"epoch {epoch['epoch']}"] = ", ".join(f"{name} {number(epoch[name])}" for name in metrics_in(epoch))
    facts["folder"] = str(run.path)
    if log := _log(run, status, records):
        facts["log"] = log
    return {name: fact for name, fact in facts.items() if fact}


def _attempts(records: Sequence[AttemptRecord], state: str, width: int | None) -> Iterator[Text]:
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
            _column("steps", steps),
            _column("lost", [str(record["lost_steps"]) for record in records], gives_way=3),
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

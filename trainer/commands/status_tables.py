"""The tables that status draws."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from trainer.cluster.run_status import RunStatus, records_of
from trainer.observe.progress import duration
from trainer.records.attempt_record import AttemptRecord
from trainer.records.metrics import damaged_lines
from trainer.rundir import RunDir

COLOURS = {
    "running": "green",
    "starting": "yellow",
    "stopping": "yellow",
    "requeued": "yellow",
    "queued": "cyan",
    "finished": "bold green",
    "failed": "bold red",
    "lost": "bold red",
    "unknown": "magenta",
}


def runs_table(runs: Sequence[RunStatus], more: Mapping[str, Mapping[str, str]] | None = None) -> Table:
    """A row per run. `more` holds further columns by title: a cell for each run, by its name."""
    more = more or {}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    for title in more:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state")
    for title in ("step", "epoch", "loss", "samples/s", "left", "attempts", "lost", "goodput"):
        table.add_column(title, justify="right", no_wrap=True)
    for status in runs:
        table.add_row(
            status.run,
            *(cells[status.run] for cells in more.values()),
            _state(status),
            _of(status.step, status.total_steps),
            or_dash(status.epoch),
            or_dash(status.loss, "{:.4f}"),
            or_dash(status.samples_per_s, "{:,.0f}"),
            "-" if status.eta_s is None else duration(status.eta_s),
            str(status.attempts),
            str(status.lost_steps),
            or_dash(status.goodput, "{:.0%}"),
        )
    return table


def run_details(run: RunDir) -> list[Table | Text]:
    """The attempts of one run, damage in its files, and where its folder is."""
    table = Table(box=None, header_style="bold", pad_edge=False, title="\nattempts", title_justify="left")
    for title in ("attempt", "job", "began", "lasted", "ranks"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("hosts")
    for title in ("steps", "lost"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ended")
    for record in records_of(run):
        table.add_row(*_attempt_row(record))
    damaged = {path.name: damaged_lines(path) for path in (run.attempts, run.metrics)}
    notes = [f"\n{name}: damaged, {lines} lines skipped" for name, lines in damaged.items() if lines]
    return [table, *(Text(note, style="yellow") for note in notes), Text(f"\nfolder {run.path}", style="dim")]


def _state(status: RunStatus) -> Text:
    text = Text(status.state, style=COLOURS.get(status.state, ""))
    notes = [status.why] if status.why else []
    if status.starts_at:
        notes.append(f"expected {_clock(status.starts_at)}")
    if status.job_id and status.alive:
        notes.insert(0, f"job {status.job_id}")
    return text.append(f"  {', '.join(notes)}" if notes else "", style="dim")


def _attempt_row(record: AttemptRecord) -> list[str]:
    end = record["end"] or time.time()
    job = f"{record['job_id']} (restart {record['restart']})" if record["restart"] else record["job_id"]
    return [
        str(record["attempt"]),
        job,
        _clock(record["start"]),
        duration(end - record["start"]),
        str(record["world_size"]),
        ", ".join(record["hosts"]),
        f"{record['start_step']} to {record['end_step']}" if record["reason"] else f"{record['start_step']} on",
        str(record["lost_steps"]),
        record["reason"] or "",
    ]


def _of(step: int | None, total: int | None) -> str:
    return "-" if step is None else f"{step}/{total}" if total else str(step)


def or_dash(value: float | None, form: str = "{}") -> str:
    """The formatted value, or a dash for None."""
    return "-" if value is None else form.format(value)


def _clock(at: float) -> str:
    """Local time; with the date if that is not today. `at` is in Unix seconds."""
    moment, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if moment[:3] == today[:3] else "%Y-%m-%d %H:%M", moment)

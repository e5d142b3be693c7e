"""status: how runs stand, from one look at Slurm's queue and the runs' own files."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainer.cluster import run_folders
from trainer.cluster.run_status import RunStatus, StatusReader, records_of
from trainer.cluster.sweep import members
from trainer.config.errors import ConfigError
from trainer.observe.progress import duration
from trainer.records.attempt_record import AttemptRecord
from trainer.records.metrics import damaged_lines, is_step, last_lines
from trainer.rundir import RunDir

WATCH_S = 2.0  # between two looks at the files
WIDE = 250  # columns
COLOURS = {
    "running": "green",
    "stopping": "yellow",
    "requeued": "yellow",
    "queued": "cyan",
    "finished": "bold green",
    "failed": "bold red",
    "lost": "bold red",
    "unknown": "magenta",
}


def status(names: Sequence[str], overrides: Sequence[str], as_json: bool, watch: bool) -> int:
    """Print how the named runs, or all in the root, stand; one run alone with its attempts too."""
    root = run_folders.root_of(overrides)

    def chosen() -> list[RunDir]:
        return [run_folders.find(name, root) for name in names] if names else run_folders.in_root(root)

    def draw(found: Sequence[RunStatus]) -> RenderableType:
        if not found:
            return Text(f"no run in {root}/ yet")
        if len(names) == 1:
            return Group(_table(found), *_details(chosen()[0]))
        return _table(found)

    return _present(lambda lookout: lookout.look(chosen()), draw, as_json, watch)


def status_of_sweep(name: str, metric: str, overrides: Sequence[str], as_json: bool, watch: bool) -> int:
    """The same of a sweep's runs, the best first: the lowest loss, or the highest of any other metric."""
    sweep = RunDir(Path(run_folders.root_of(overrides)) / name)
    varied = members(sweep)

    def value(run: str) -> float | None:
        lines = last_lines(RunDir(sweep.path.parent / run).metrics)
        found = (line[metric] for line in reversed(lines) if metric in line and not is_step(line))
        return next(found, None)

    def look(lookout: StatusReader) -> list[RunStatus]:
        found = lookout.look([RunDir(sweep.path.parent / run) for run in varied])
        sign = 1 if "loss" in metric else -1
        order = {one.run: value(one.run) for one in found}
        return sorted(found, key=lambda one: math.inf if (v := order[one.run]) is None else sign * v)

    def draw(found: Sequence[RunStatus]) -> RenderableType:
        keys = list(dict.fromkeys(key for change in varied.values() for key in change))
        columns = {key: {run: str(change.get(key, "")) for run, change in varied.items()} for key in keys}
        columns[metric] = {run: _or_dash(value(run), "{:.4f}") for run in varied}
        return _table(found, columns)

    return _present(look, draw, as_json, watch)


def _present(
    look: Callable[[StatusReader], list[RunStatus]],
    draw: Callable[[Sequence[RunStatus]], RenderableType],
    as_json: bool,
    watch: bool,
) -> int:
    """Print what a look finds, or keep it up to date on the terminal."""
    if watch and (as_json or not sys.stdout.isatty()):
        raise ConfigError("--watch: keeps a table on a terminal; leave it out for a file, a pipe or --json")
    lookout = StatusReader()
    if as_json:
        print(json.dumps([vars(one) for one in look(lookout)], indent=1))
        return 0
    if not watch:
        _console().print(draw(look(lookout)))
        return 0
    with Live(draw(look(lookout)), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(draw(look(lookout)), refresh=True)


def _console() -> Console:
    """As wide as the terminal; into a file or a pipe nothing is cut off."""
    return Console() if sys.stdout.isatty() else Console(width=WIDE)


def _table(found: Sequence[RunStatus], more: Mapping[str, Mapping[str, str]] | None = None) -> Table:
    """`more` columns have a cell for each run, by its name."""
    more = more or {}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    for title in more:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state")
    for title in ("step", "epoch", "loss", "samples/s", "left", "attempts", "lost", "goodput"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            one.run,
            *(cells[one.run] for cells in more.values()),
            _state(one),
            _of(one.step, one.total_steps),
            _or_dash(one.epoch),
            _or_dash(one.loss, "{:.4f}"),
            _or_dash(one.samples_per_s, "{:,.0f}"),
            "-" if one.eta_s is None else duration(one.eta_s),
            str(one.attempts),
            str(one.lost_steps),
            _or_dash(one.goodput, "{:.0%}"),
        )
    return table


def _state(one: RunStatus) -> Text:
    text = Text(one.state, style=COLOURS.get(one.state, ""))
    said = [one.why] if one.why else []
    if one.starts_at:
        said.append(f"expected {_clock(one.starts_at)}")
    if one.job_id and one.alive:
        said.insert(0, f"job {one.job_id}")
    return text.append(f"  {', '.join(said)}" if said else "", style="dim")


def _details(run: RunDir) -> list[Table | Text]:
    """Its attempts, and where to look next."""
    table = Table(box=None, header_style="bold", pad_edge=False, title="\nattempts", title_justify="left")
    for title in ("attempt", "job", "began", "lasted", "ranks"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("hosts")
    for title in ("steps", "lost"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("ended")
    for record in records_of(run):
        table.add_row(*_attempt(record))
    damaged = {path.name: damaged_lines(path) for path in (run.attempts, run.metrics)}
    notes = [f"\n{name}: damaged, {lines} of its lines passed over" for name, lines in damaged.items() if lines]
    return [table, *(Text(note, style="yellow") for note in notes), Text(f"\nfolder {run.path}", style="dim")]


def _attempt(record: AttemptRecord) -> list[str]:
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


def _or_dash(value: float | None, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _clock(at: float) -> str:
    """A moment in local time, with the day when that is not today."""
    moment, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if moment[:3] == today[:3] else "%Y-%m-%d %H:%M", moment)

"""report: one HTML page that shows how runs went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.cluster import run_folders
from trainer.cluster.run_status import RunStatus, StatusReader, records_of
from trainer.config.config import Config
from trainer.config.errors import ConfigError
from trainer.config.keys import fields_of
from trainer.observe.report.curves import read_curves
from trainer.observe.report.page import Run, page
from trainer.rundir import RunDir


def report(names: Sequence[str], overrides: Sequence[str]) -> int:
    """Write the page of the named runs, one run's into its folder, that of several into this one; print its path."""
    root = run_folders.root_of(overrides)
    found = [run_folders.find(name, root) for name in names]
    target = found[0].report if len(found) == 1 else Path("report.html").absolute()
    text = page([_shown(run, stands) for run, stands in zip(found, StatusReader().look(found))])
    try:
        target.write_text(text, errors="replace")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from None
    print(target)
    return 0


def _shown(run: RunDir, stands: RunStatus) -> Run:
    records = records_of(run)
    kept = {record["end_step"] - record["lost_steps"] for record in records}
    return Run(
        name=run.name,
        state=stands.state,
        why=stands.why,
        alive=stands.alive,
        step=stands.step,
        total_steps=stands.total_steps,
        records=records,
        curves=read_curves(run.metrics, kept),
        config={key: value for key, _, value in fields_of(Config.load(run.config))},
        yaml=run.config.read_text(errors="replace"),
    )

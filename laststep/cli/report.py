"""report: write one HTML page that shows how runs went."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from laststep import rooms
from laststep.cli.parsers import Parser, add_runs, add_sweep, named_runs
from laststep.config.errors import ConfigError
from laststep.config.keys import fields_of
from laststep.records.submissions import read_submissions
from laststep.report.curves import read_curves
from laststep.report.page import Run, page
from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.runs.run_status import RunStatus, StatusReader, records_of, time_of

DESCRIPTION = """\
Write the curves and attempts of one run, or of several side by side, to one
HTML page: report.html, in the folder of the run, or for several runs here."""


def add_arguments(parser: Parser) -> None:
    """Declare what report takes."""
    add_sweep(parser, "all runs of this sweep")
    add_runs(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write this file instead")


def run(args: argparse.Namespace) -> int:
    """Write the page of the named runs and print its path; returns the exit status."""
    runs = named_runs(args)
    target = (args.output or (runs[0].report if len(runs) == 1 else Path("report.html"))).absolute()
    contents = [_contents(run, status) for run, status in zip(runs, StatusReader().read(runs))]
    try:
        text = page(contents)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        raise ConfigError(f"the report needs plotly, which {sys.executable} lacks: pip install plotly") from None
    try:
        target.write_text(text, errors="replace")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from None
    print(target)
    return 0


def _contents(run: RunDir, status: RunStatus) -> Run:
    """What the page shows of a run."""
    records, config = records_of(run), run_config.as_submitted(run)
    kept = {record["end_step"] - record["lost_steps"] for record in records}
    return Run(
        status=status,
        time=time_of(status),
        records=records,
        submissions=read_submissions(run.submissions),
        curves=read_curves(run.metrics, kept),
        config={key: value for key, _, value in fields_of(config)},
        yaml=config.to_yaml(),
        figures=rooms.told("figures", run),
        more=rooms.told("facts", run),
        links=rooms.told("links", run),
    )

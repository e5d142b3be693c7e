"""disk: what each run holds on the disk, and what may go."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from laststep.cli.parsers import ROOT_KEY, Parser
from laststep.say import note

DESCRIPTION = """\
Show what each run holds on the disk, the environments that runs share
(launch.uv), and what may go, with the command that removes it. Removes nothing
itself."""


def add_arguments(parser: Parser) -> None:
    """Declare what disk takes."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar=ROOT_KEY, help="the folder that holds all runs")


def run(args: argparse.Namespace) -> int:
    """Print it; returns the exit status."""
    from laststep.runs import run_folders
    from laststep.runs.disk_use import disk_use

    found = disk_use(run_folders.runs_root(args.overrides))
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return 0
    titles = ("run", "state", "checkpoints", "code", "logs", "other")
    parts = [(use, (use.checkpoints, use.code, use.logs, use.other)) for use in found.runs]
    rows = [titles, *((use.run, use.state, *map(_size, sizes)) for use, sizes in parts)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows if found.runs else []:
        words = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        print("  ".join([*words, *(cell.rjust(width) for cell, width in zip(row[2:], widths[2:]))]))
    for shared in found.environments:
        more = " ..." if len(shared.runs) > 3 else ""
        users = f"used by {', '.join(shared.runs[:3])}{more}" if shared.runs else "not used"
        note(f"{run_folders.short(shared.environment)}  {_size(shared.bytes)}, {users}", sys.stdout, indent=2)
    total = sum(use.total for use in found.runs) + sum(shared.bytes for shared in found.environments)
    print(f"{_size(total)} in {run_folders.short(found.root)}, {_size(found.free)} free")
    print("may go" if found.may_go else "nothing that may go")
    for spare in found.may_go:
        note(f"  {_size(spare.bytes):>9}  {spare.what}\n             {spare.command}", sys.stdout, indent=13)
    return 0


def _size(count: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"

"""samples: name the samples that a step used."""

from __future__ import annotations

import argparse
import json

from laststep.cli.parsers import Parser, add_run, named_run

DESCRIPTION = """\
Name the samples that a step used, for every rank or share: their numbers in the
training set; of token files, also the file, the document and its first words."""


def add_arguments(parser: Parser) -> None:
    """Declare what samples takes."""
    parser.add_argument("--step", type=int, metavar="N", required=True, help="the step, from 1")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Print the samples; returns the exit status. Raises ConfigError."""
    from laststep.replay.used_samples import Named, samples_of

    run = named_run(args)
    epoch, parts = samples_of(run, args.step)
    named = Named.of(run)
    if args.json:
        lines = [
            {
                "rank": part.rank,
                "share": part.share,
                "rows": part.rows,
                "names": [named.of_row(row) for row in part.rows],
            }
            for part in parts
        ]
        print(json.dumps({"run": run.name, "step": args.step, "epoch": epoch, "samples": lines}, indent=1))
        return 0
    print(f"{run.name}: step {args.step}, epoch {epoch}")
    for part in parts:
        where = f"rank {part.rank}" if part.share is None else f"share {part.share}, rank {part.rank}"
        if not named.known:
            print(f"{where}: {' '.join(map(str, part.rows))}")
            continue
        print(f"{where}:")
        for row in part.rows:
            print(f"  {row:>8}  {named.of_row(row)}")
    return 0

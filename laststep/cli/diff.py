"""diff: find where two runs part."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from laststep.cli.parsers import ROOT_KEY, Parser
from laststep.config.errors import ConfigError

if TYPE_CHECKING:
    from laststep.replay.parting import Operator, Parting
    from laststep.rundir import RunDir

DESCRIPTION = """\
Find where two runs part: what differs in configuration, code and environment;
the first step whose metrics or digests differ; and, by doing that step again
for both here, the first operator whose result differs."""
EPILOG = """\
Exit status: 0 no difference; 1 they differ; 2 wrong input."""
MOST = 8  # lines of one kind


def add_arguments(parser: Parser) -> None:
    """Declare what diff takes."""
    parser.add_argument("--records", action="store_true", help="do no step again")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("first", metavar="A", help="name or folder of a run")
    parser.add_argument("second", metavar="B", help="name or folder of another")
    parser.add_argument("overrides", nargs="*", default=[], metavar=ROOT_KEY, help="the folder that holds all runs")


def run(args: argparse.Namespace) -> int:
    """Compare; returns the exit status. Raises ConfigError."""
    from laststep.replay import parting
    from laststep.runs import run_folders
    from laststep.submission.sbatch import throwaway_folder

    root = run_folders.runs_root(args.overrides)
    first, second = (run_folders.find_run(name, root) for name in (args.first, args.second))
    if first.path == second.path:
        raise ConfigError(f"{args.first} {args.second}: the same run twice")
    found = parting.around(first, second)
    say = sys.stderr if args.json else sys.stdout
    for line in _around(found, first, second):
        print(line, file=say, flush=True)
    if not found.steps:
        raise ConfigError(f"{first.name} {second.name}: have no step that both have done, so nothing can be compared")
    if found.recorded is not None and not args.records:
        print(f"again  both from step {found.known_same + 1} to {found.recorded} ...", file=say, flush=True)
        with throwaway_folder("diff") as folder:
            try:
                parting.find(found, first, second, folder)
            except RuntimeError as error:
                print(f"failed {error}", file=sys.stderr)
                return 1
        for line in _within(found, first, second):
            print(line, file=say)
    if args.json:
        print(json.dumps(as_json(found), indent=1))
    return int(found.recorded is not None)


def as_json(found: Parting) -> dict[str, Any]:
    """The result, with fields that stay."""
    operator = None
    if found.operator is not None:
        one = found.operator
        operator = {"rank": one.rank, "number": one.number, "bits": one.bits, "a": one.first, "b": one.second}
    return {
        "steps": found.steps,
        "configuration": found.settings,
        "code": found.code,
        "environment": found.environment,
        "recorded_step": found.recorded,
        "fields": found.fields,
        "step": found.step,
        "what": found.what,
        "operator": operator,
        "not_reproduced": found.not_again,
    }


def _around(found: Parting, first: RunDir, second: RunDir) -> Iterator[str]:
    for kind, pairs in (("config", found.settings), ("env", found.environment)):
        for number, (key, (one, other)) in enumerate(pairs.items()):
            if number == MOST:
                yield f"{kind:<6} and {len(pairs) - MOST} more"
                break
            yield f"{kind:<6} {key}: {one} | {other}"
    for file in found.code[:MOST]:
        yield f"code   {file}"
    if found.recorded is not None:
        yield f"first  step {found.recorded} is the first whose records differ: {', '.join(found.fields)}"
    elif found.steps:
        yield f"same   {first.name} and {second.name}: nothing differs in the {found.steps} steps that both have done"


def _within(found: Parting, first: RunDir, second: RunDir) -> Iterator[str]:
    for name in found.not_again:
        yield f"WARNING: {name} does not come out again as it was recorded:"
        yield "         its code, data or machine has changed, or it was computed wrongly then"
    if found.step is None:
        yield "same   done again, both runs have the same bits in all these steps"
        return
    yield f"step   {found.step} is the first that differs: {'; '.join(found.what[:3])}"
    if len(found.what) > 3:
        yield f"       and {len(found.what) - 3} more"
    if found.operator is None:
        return
    yield from _operator(found.operator, first, second)


def _operator(found: Operator, first: RunDir, second: RunDir) -> Iterator[str]:
    lines = [_described(one) for one in (found.first, found.second)]
    where = f"rank {found.rank}, operator {found.number} of the step"
    if lines[0] == lines[1]:
        yield f"where  {where}: {lines[0]}"
        if found.bits is not None:
            yield f"bits   {found.bits} differ"
        return
    yield f"where  {where}: the runs do different things"
    for run, line in zip((first, second), lines):
        yield f"       {run.name}: {line}"


def _described(line: Any) -> str:
    if line is None:
        return "nothing more in this step"
    shapes = ", ".join(f"{kind}{shape}" for kind, shape in zip(line["types"], line["shapes"]))
    return f"{line['operator']}{' in ' + line['where'] if line['where'] else ''} -> {shapes}"

"""replay: do a step again, with the same batch and the same bits."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.cli.parsers import JOB_OPTIONS, LAUNCH_KEY, Parser, add_key_options, named_run, overrides_of
from laststep.config.errors import ConfigError
from laststep.say import counted

if TYPE_CHECKING:
    from laststep.replay.again import Stretch
    from laststep.rundir import RunDir

DESCRIPTION = """\
Do a step of a run again, from the nearest checkpoint before it, and say whether
it came out the same: on this machine, or with --nodes or another launch word by
a job. The run itself stays as it is."""
EPILOG = """\
With train.shares one rank is enough; else as many start as have done the step.
A job is a run of its own, RUN-replay-N-..., with RUN's launch.* keys.
Exit status: 0 the same; 1 not the same, or the run failed; 2 wrong input."""


def add_arguments(parser: Parser) -> None:
    """Declare what replay takes."""
    parser.add_argument("--step", type=int, metavar="N", required=True, help="the step, from 1")
    parser.add_argument("--to", type=int, metavar="M", help="also the steps after it, up to this one")
    parser.add_argument("--ranks", type=int, metavar="R", help="on this many ranks, with train.shares")
    parser.add_argument("--save-batch", metavar="FILE", help="write rank 0's batch of step N, for torch.load")
    parser.add_argument("--profile", metavar="FILE", help="write rank 0's trace of step N, for chrome://tracing")
    parser.add_argument("--debug", action="store_true", help="stop in pdb before step N")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the replayed run in this new folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_key_options(parser, JOB_OPTIONS)
    parser.add_argument("run", metavar="RUN", help="name or folder of the run")
    parser.add_argument("overrides", nargs="*", metavar=LAUNCH_KEY, help="of the job; or launch.root")


def run(args: argparse.Namespace) -> int:
    """Replay; returns the exit status. Raises ConfigError."""
    from laststep.replay import again
    from laststep.replay.again import Stretch

    words, asked = _job_words(args), _asked(args)
    first, last = args.step, args.step if args.to is None else args.to
    stretch = Stretch.of(named_run(args), first, last, args.ranks, as_done=bool(words))
    plan = again.looking(first, asked) if asked else None
    said = sys.stderr if args.json else sys.stdout
    try:
        if words:
            config = again.job_for(stretch, words, plan)
            print(stretch.described(config.launch.world_size), file=said, flush=True)
            with contextlib.redirect_stdout(said):
                copy = again.submit_job(stretch, config)
            again.await_job(stretch, copy)
            return _show(args, stretch, copy, config.launch.world_size, asked)
        again.check_gpus(stretch)
        if args.debug:
            again.check_debug(stretch)
        print(stretch.described(stretch.ranks), file=said, flush=True)
        with again.folder_for(args.keep) as folder:
            copy = again.copy_of(stretch, folder)
            if args.debug:
                return again.debug(stretch, copy, asked)
            again.train(stretch, copy, plan)
            return _show(args, stretch, copy, stretch.ranks, asked)
    except RuntimeError as error:
        print(f"failed {error}", file=sys.stderr)
        return 1


def _asked(args: argparse.Namespace) -> dict[str, str]:
    """The files to write about the first step, by what is in them. Raises ConfigError."""
    asked = {}
    for name, given in (("batch", args.save_batch), ("trace", args.profile)):
        if given is not None:
            path = Path(given).absolute()
            if path.is_dir() or not path.parent.is_dir():
                why = "is a folder; name a file in it" if path.is_dir() else f"there is no folder {path.parent}"
                raise ConfigError(f"{given}: {why}")
            asked[name] = str(path)
    return asked


def _show(args: argparse.Namespace, stretch: Stretch, copy: RunDir, ranks: int, asked: Mapping[str, str]) -> int:
    """Print whether it came out the same; returns the exit status."""
    from laststep.records.metrics import DIGEST
    from laststep.replay import again

    run, first, last = stretch.run, stretch.first, stretch.last
    found = again.differences(run, copy, first, last)
    digests = sum(DIGEST in line for line in again.steps_of(run, first, last).values())
    if args.json:
        result = {
            "run": run.name,
            "from": stretch.start,
            "ranks": ranks,
            "steps": sorted(again.steps_of(copy, first, last)),
            "same": not found,
            "digests_compared": digests,
            "differences": [one._asdict() for one in found],
        }
        print(json.dumps(result, indent=1))
        return int(bool(found))
    for each in found[:10]:
        print(f"step   {each.step}: {each.name} was {each.recorded}, is {each.again}")
    for name, path in asked.items():
        print(f"{name:<6} {path}")
    if args.keep:
        print(f"kept   {args.keep}")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    by = f"metrics and {counted(digests, 'digest')}" if digests else "metrics; the run has no digest of these steps"
    print(f"{steps}: {'NOT the same' if found else 'the same'} ({by})")
    return int(bool(found))


def _job_words(args: argparse.Namespace) -> list[str]:
    """The `launch` words of a job; none: the replay is on this machine. Raises ConfigError."""
    words = overrides_of(args)
    args.overrides = [word for word in words if word.startswith("launch.root=")]
    words = [word for word in words if word not in args.overrides]
    for word in words:
        if not word.startswith("launch.") or word.startswith("launch.name="):
            raise ConfigError(f"{word}: a replay keeps the run's configuration, but for the launch.* keys of its job")
    if args.debug and args.json:
        raise ConfigError("--json --debug: the debugger has the terminal; leave one out")
    for option, given, fix in (
        ("--debug", args.debug, "it needs one process on this machine"),
        ("--keep", args.keep, "a job's folder stays anyway"),
        ("--ranks", args.ranks, "a job has nodes x ranks per node"),
    ):
        if words and given:
            raise ConfigError(f"{option} {words[0]}: {fix}; leave one out")
    return words

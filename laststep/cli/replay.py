"""replay: do a step again, with the same batch and the same bits."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

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
    from laststep.replay import again, job
    from laststep.replay.again import Stretch

    words, run = _job_words(args), named_run(args)
    first, last = args.step, args.step if args.to is None else args.to
    stretch = Stretch.of(run, first, last, args.ranks, as_done=bool(words))
    if args.debug:
        again.check_debug(stretch)
    files = _files(args)
    plan = again.looking(first, files) if files else None
    config = job.configured(stretch, words, plan) if words else None
    if config is None:
        again.check_gpus(stretch)
    ranks = stretch.ranks if config is None else config.launch.world_size
    say = sys.stderr if args.json else sys.stdout
    _announce(stretch, ranks, say)
    with _folder(args.keep) if config is None else contextlib.nullcontext(run.path) as folder:
        try:
            if config is not None:
                with contextlib.redirect_stdout(say):
                    copy = job.submit(stretch, config)
                job.wait(stretch, copy)
            else:
                copy = again.copy_of(stretch, folder)
                if args.debug:
                    return again.debug(stretch, copy)
                again.train(stretch, copy, plan)
        except RuntimeError as error:
            print(f"failed {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            if config is None:
                raise
            return 130
        found = again.differences(run, copy, first, last)
        steps, digests = sorted(again.steps_of(copy, first, last)), again.compared_digests(run, first, last)
    if args.json:
        result = {
            "run": run.name,
            "from": stretch.start,
            "ranks": ranks,
            "steps": steps,
            "same": not found,
            "digests_compared": digests,
            "differences": [one._asdict() for one in found],
        }
        print(json.dumps(result, indent=1))
        return int(bool(found))
    for each in found[:10]:
        print(f"step   {each.step}: {each.name} was {each.recorded}, is {each.again}")
    for name, path in (*files.items(), *([("kept", args.keep)] if args.keep else [])):
        print(f"{name:<6} {path}")
    shown = f"step {first}" if first == last else f"steps {first} to {last}"
    by = f"metrics and {counted(digests, 'digest')}" if digests else "metrics; the run has no digest of these steps"
    print(f"{shown}: {'NOT the same' if found else 'the same'} ({by})")
    return int(bool(found))


def _files(args: argparse.Namespace) -> dict[str, str]:
    """The files to write, by what is asked for. Raises ConfigError."""
    asked = {"batch": args.save_batch, "trace": args.profile}
    files = {name: str(Path(path).absolute()) for name, path in asked.items() if path is not None}
    for path in files.values():
        if not Path(path).parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {Path(path).parent}")
    return files


def _announce(stretch: Stretch, ranks: int, say: IO[str]) -> None:
    begins = f"the checkpoint of step {stretch.start}" if stretch.start else "the beginning of the run"
    print(f"replay {stretch.run.name} from {begins}, {counted(ranks, 'rank')}", file=say, flush=True)


def _job_words(args: argparse.Namespace) -> list[str]:
    """The `launch` words of a job; none: the replay is on this machine. Raises ConfigError."""
    words = overrides_of(args)
    args.overrides = [word for word in words if word.startswith("launch.root=")]
    words = [word for word in words if word not in args.overrides]
    for word in words:
        if not word.startswith("launch.") or word.startswith("launch.name="):
            raise ConfigError(f"{word}: a replay keeps the run's configuration, but for the launch.* keys of its job")
    for option, given, fix in (
        ("--debug", args.debug, "it needs one process on this machine"),
        ("--keep", args.keep, "a job's folder stays anyway"),
        ("--ranks", args.ranks, "a job has nodes x ranks per node"),
    ):
        if words and given:
            raise ConfigError(f"{option} {words[0]}: {fix}; leave one out")
    return words


@contextlib.contextmanager
def again_up_to(source: RunDir, step: int) -> Iterator[RunDir]:
    """A copy of the run that has a checkpoint of `step`, done again for it and removed after the block. Raises
    ConfigError."""
    from laststep.replay import again
    from laststep.replay.again import Stretch

    stretch = Stretch.of(source, step, step)
    again.check_gpus(stretch)
    _announce(stretch, stretch.ranks, sys.stdout)
    with _folder(None) as folder:
        copy = again.copy_of(stretch, folder)
        try:
            again.train(stretch, copy)
        except RuntimeError as error:
            raise ConfigError(f"--from {source.name}@{step}: {error}") from None
        if differences := again.differences(source, copy, stretch.start + 1, step):
            first = differences[0]
            raise ConfigError(
                f"--from {source.name}@{step}: step {first.step} does not come out again as it was recorded "
                f"({first.name} differs), so no run can begin after it; branch off a checkpoint"
            )
        yield copy


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """Where the replay works; removed at the end, however the command ends, unless it is to be kept."""
    from laststep.submission.sbatch import ended_by_signals, throwaway_folder

    if keep is None:
        with throwaway_folder("replay") as place:
            yield place
        return
    place = Path(keep).absolute()
    try:
        place.mkdir()
    except OSError as error:
        raise ConfigError(f"--keep {keep}: {error.strerror}; name a new folder") from None
    with ended_by_signals():
        yield place

"""`python -m laststep hello`: the smallest distributed program, to test any launcher."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from laststep.cli.parsers import Parser
from laststep.config.config import Config
from laststep.doctor.greeting import gather_greetings, greet, wrong_sums
from laststep.ranks.launchers import detect_world
from laststep.ranks.process import Signals
from laststep.ranks.world import MeetingError, World
from laststep.runs import run_folders
from laststep.submission.local import spawn

DESCRIPTION = """\
Every rank meets the others as in a run, says who it is, and helps to sum a one
from each rank."""
EPILOG = """\
Start it the way you start a run:
  python -m laststep hello --spawn 4
  torchrun --nproc-per-node 4 -m laststep hello
  srun python -m laststep hello
  mpirun python -m laststep hello
Exit status: 0 every rank arrived and has the right sum; 1 a rank did not arrive
or has a wrong sum; 2 wrong input.
"""
SHOWN = ("NCCL_", "GLOO_", "TORCH_", "MASTER_", "CUDA_VISIBLE_DEVICES")


def main(words: Sequence[str]) -> int:
    """Say hello from this rank; returns the exit status. Raises ConfigError."""
    parser = Parser("python -m laststep hello", DESCRIPTION, EPILOG)
    parser.add_argument("--spawn", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument("--backend", metavar="B", help="auto, nccl or gloo (launch.backend)")
    parser.add_argument("--env", action="store_true", help="print the variables of NCCL, gloo and torch on each rank")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a configuration key")
    args = parser.parse_intermixed_args(words)
    overrides = [*args.overrides, *([f"launch.backend={args.backend}"] if args.backend else [])]
    config = Config.load(None, overrides, run_folders.site())
    run_folders.check_writable(Path(os.path.expanduser(config.launch.root)).absolute())
    hello = functools.partial(_hello, config, args.env)
    return hello() if args.spawn is None else spawn(args.spawn, hello)


def _hello(config: Config, show_variables: bool) -> int:
    """One rank. Leaves nothing behind."""
    signals = Signals.catch()
    world = detect_world()
    root = Path(os.path.expanduser(config.launch.root)).absolute()
    meeting, made_root = root / f".hello-{world.attempt}.json", not root.exists()

    def clean_up() -> None:
        if world.rank == 0:
            for file in (meeting, meeting.with_suffix(".key")):
                file.unlink(missing_ok=True)
            if made_root:
                with contextlib.suppress(OSError):  # another command uses it now
                    root.rmdir()

    def stop(number: signal.Signals) -> None:
        clean_up()
        os._exit(128 + number)  # not sys.exit: the main thread may be waiting in a collective

    signals.on_first(stop)
    from laststep.ranks.group import is_peer_loss

    try:
        return _meet_and_greet(config, world, meeting, show_variables)
    except RuntimeError as error:
        if not (isinstance(error, MeetingError) or is_peer_loss(error)):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        clean_up()


def _meet_and_greet(config: Config, world: World, meeting: Path, show_variables: bool) -> int:
    """Meet the other ranks. Rank 0 prints all greetings. Returns the exit status, 1 for a wrong sum."""
    from laststep.ranks.group import join

    group = join(config, world, meeting, timeout_s=0)
    group.connect(timeout_s=0)
    greeting = greet(group)
    gathered = gather_greetings(group, greeting, _variables())
    group.close()
    wrong = wrong_sums([greeting for greeting, _ in gathered] or [greeting])
    if world.rank == 0:
        print(*(greeting for greeting, _ in gathered), sep="\n")
        if show_variables:
            lines = _variable_lines([variables for _, variables in gathered])
            print(*lines or ["none of these variables is set"], sep="\n")
        if not wrong:
            print(f"sum of ones: {world.size} on every rank")
        for line in wrong:
            print(f"error: {line}", file=sys.stderr)
    return int(bool(wrong))


def _variables() -> dict[str, str]:
    """The environment variables of this rank that affect collectives, as they are after the meeting."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}


def _variable_lines(variables: Sequence[Mapping[str, str]]) -> list[str]:
    """A line per variable and rank; only one line for a variable that is the same on all ranks."""
    lines = []
    for name in sorted(set().union(*variables)):
        values = [of_one_rank.get(name) for of_one_rank in variables]
        if len(set(values)) == 1:
            lines.append(f"every rank: {name}={values[0]}")
        else:
            lines += [f"rank {rank}: {name}={value}" for rank, value in enumerate(values) if value is not None]
    return lines

"""tensorboard: show the curves of runs in TensorBoard, each run under its own name.

TensorBoard names a run by the folder of its event files, which would be `first/tensorboard`. So it gets a temporary
folder with a link `first` to each run's event files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laststep.cli.parsers import Parser, add_runs, add_sweep, split
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from laststep.runs import run_folders

LINK_EVERY_S = 5.0  # as often as TensorBoard looks for new files
DESCRIPTION = """\
Show the curves of all runs, or of the named ones, in TensorBoard until Ctrl-C.
Runs that begin meanwhile are added."""
EPILOG = """\
Words after -- are tensorboard's own options:
  {program} tensorboard first -- --reload_interval 30"""


def add_arguments(parser: Parser) -> None:
    """Declare what tensorboard takes."""
    parser.add_argument("--port", type=int, metavar="N", help="the port (default: 6006, or the next free)")
    parser.add_argument("--host", metavar="NAME", help="the address (default: localhost)")
    parser.add_argument("--bind_all", action="store_true", help="let other machines connect")
    add_sweep(parser, "all runs of this sweep")
    add_runs(parser)
    parser.passes_on = True


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Raises ConfigError."""
    from laststep.submission.sbatch import throwaway_folder

    try:
        from tensorboard import program
    except ModuleNotFoundError as error:
        raise ConfigError(f"{sys.executable} lacks {error.name}: pip install tensorboard") from None
    names, overrides = split(args.words)
    root = run_folders.runs_root(overrides)

    def find() -> list[RunDir]:
        named = names or args.sweep is not None
        return run_folders.find_runs(names, root, args.sweep) if named else run_folders.all_runs(root)

    with throwaway_folder("tensorboard") as folder:
        links = _Links(folder, find)
        if not links.update():
            raise ConfigError("no run has curves yet; a run writes its first ones some seconds after its first step")
        server = _configured(program.TensorBoard(), ["--logdir", str(folder), *_options(args)])
        try:
            url = server.launch()
        except program.TensorBoardServerException as error:
            raise ConfigError(" ".join(error.msg.split())) from None
        print(f"TensorBoard is at {url}; Ctrl-C ends it", flush=True)
        while True:
            time.sleep(LINK_EVERY_S)
            with contextlib.suppress(ConfigError, OSError):  # a named run was deleted; a disk does not answer
                links.update()


class _Links:
    """A folder with a link to the event files of each run that has some."""

    def __init__(self, folder: Path, find: Callable[[], Sequence[RunDir]]) -> None:
        self._folder, self._find = folder, find

    def update(self) -> bool:
        """Link the runs that have got curves since the last call; returns whether any run has some. Raises
        ConfigError."""
        for run in self._find():
            link = self._folder / run.name
            if link.is_symlink() and link.readlink() != run.tensorboard:
                raise ConfigError(f"{run.name}: two runs have this name, {link.readlink().parent} and {run.path}")
            if not link.is_symlink() and any(run.tensorboard.glob("*tfevents*")):
                link.symlink_to(run.tensorboard)
        return any(self._folder.iterdir())


def _options(args: argparse.Namespace) -> list[str]:
    """tensorboard's own options."""
    given = [f"--{name}={value}" for name in ("port", "host") if (value := getattr(args, name)) is not None]
    return [*given, *["--bind_all"] * args.bind_all, *args.passed_on]


def _configured(server: Any, options: list[str]) -> Any:
    """TensorBoard with these options. Raises ConfigError, with the last line of what it would print about them."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            server.configure(["tensorboard", *options])
    except ValueError as error:  # options that exclude each other
        raise ConfigError(str(error)) from None
    except SystemExit as error:
        if error.code:
            raise ConfigError(errors.getvalue().strip().splitlines()[-1].removeprefix("tensorboard: error: ")) from None
        raise
    return server

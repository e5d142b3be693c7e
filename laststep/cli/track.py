"""track: send to a run's trackers what has not been sent yet."""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.cli.parsers import Parser, add_run, named_run
from laststep.config.errors import ConfigError
from laststep.rundir import RunDir
from laststep.say import counted, note

if TYPE_CHECKING:
    from laststep.track.sender import Sender

CLOSE_S = 20.0  # how long a tracker may take to end after Ctrl-C
DESCRIPTION = """\
Send to the trackers of a run what they do not have yet: each step once. Type it
on a login node if the others have no internet."""


def add_arguments(parser: Parser) -> None:
    """Declare what track takes."""
    add_run(parser)
    parser.add_argument("--follow", action="store_true", help="until the run has ended, or Ctrl-C")
    parser.add_argument("--weights", action="store_true", help="the newest checkpoint's weights as well")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Send; returns the exit status."""
    from laststep.runs import run_config
    from laststep.runs.run_status import StatusReader
    from laststep.track import sender as sending
    from laststep.track.wanted import wishes

    if args.follow and args.weights:
        raise ConfigError("--weights: sends what is there now; leave out --follow")
    if args.follow and args.json:
        raise ConfigError("--json: prints how far the trackers are once; leave out --follow")
    folder = named_run(args)
    found = wishes(run_config.as_submitted(folder))
    if not found:
        raise ConfigError(f"{folder.name}: has no tracker; `resume {folder.name} track.wandb.project=NAME` adds one")
    senders = []
    for wish in found:
        lock = sending.Lock(folder.track(wish.tracker))
        if wish.by_script:
            note(f"{wish.tracker}: the run's script sends to it (track.{wish.tracker}.by=script)")
        elif not lock.take():
            note(f"{wish.tracker}: another process sends to it just now ({lock.holder()})")
        else:
            senders.append(sending.Sender(folder, wish, note))
    reader = StatusReader()
    work = _follow if args.follow else _send
    failed = work(senders, lambda: not reader.read([folder])[0].alive, args)
    if args.json:
        print(json.dumps([{"tracker": one.name, **vars(one.sent)} for one in senders], indent=1))
    return 1 if failed else 0


def _send(senders: Sequence[Sender], is_over: Callable[[], bool], args: argparse.Namespace) -> bool:
    """Send once; returns whether a tracker has refused."""
    failed = False
    for one in senders:
        try:
            one.send(last=is_over())
            if args.weights:
                with tempfile.TemporaryDirectory() as folder:
                    one.weights(_weights_of(one.run, Path(folder)))
            one.close()
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # of a tracker's package: there are many types
            note(f"error: {one.name}: {one.failed(error)}")
            failed = True
            continue
        if not args.json:
            place = f"; {one.sent.url}" if one.sent.url else ""
            print(f"{one.name}: sent up to step {one.sent.step}, {counted(one.given, 'step')} now{place}")
    return failed


def _follow(senders: Sequence[Sender], is_over: Callable[[], bool], args: argparse.Namespace) -> bool:
    """Send until the run has ended."""
    from laststep.track.sender import follow

    ending = threading.Event()
    threads = [threading.Thread(target=follow, args=(one, ending, is_over, note), daemon=True) for one in senders]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        ending.set()
        for thread in threads:
            thread.join(CLOSE_S)
        raise
    return any(one.sent.error for one in senders)


def _weights_of(run: RunDir, folder: Path) -> Path:
    """The weights of a run's newest checkpoint, as a file in this folder. Raises ConfigError."""
    from laststep.checkpoint import export

    weights = export.read_run(run)
    return export.write(folder / f"{run.name}.safetensors", weights.tensors, {"format": "pt"})[0]

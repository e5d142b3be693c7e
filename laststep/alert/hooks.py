"""What the room of alerts adds to a run, see laststep.rooms: a check, and the programs that look and send."""

from __future__ import annotations

import importlib
import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from laststep.alert.post import is_url
from laststep.alert.section import KINDS
from laststep.alert.watch import look_once
from laststep.config.errors import ConfigError, nearest
from laststep.config.secret import is_mask, masked
from laststep.ranks.beside import Beside
from laststep.rundir import RunDir

LOOKER = "laststep.alert.watch"


def programs(config: Any, run: RunDir) -> Iterator[Beside]:
    """One beside rank 0, and one beside the rank that records an end, which may be another."""
    if config.alert.to and run.secrets.exists():
        yield Beside("alert", LOOKER, "run", memory_gb=2.0)
        yield Beside("alert", LOOKER, "end", memory_gb=2.0)


def check(config: Any, machine: Any) -> None:
    """Raise ConfigError for an event or a target that cannot be."""
    for kind in config.alert.when:
        if kind not in KINDS:
            raise ConfigError(f"alert.when={kind}: {nearest(kind, KINDS)}")
    for target in config.alert.to:
        if is_mask(target):  # kept in the run's folder
            continue
        if is_url(target):
            _check_url(target)
        elif not (words := _words(target)) or shutil.which(words[0]) is None:
            name = words[0] if words else target
            raise ConfigError(f"alert.to: {name or 'an empty word'} is neither a URL nor a command on this machine")


def _check_url(target: str) -> None:
    try:
        apprise = importlib.import_module("apprise")
    except ImportError:
        raise ConfigError(
            f"alert.to={masked(target)}: needs apprise, which {sys.executable} lacks: pip install apprise"
        ) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its words hold the secret
    if not apprise.Apprise().add(target):
        raise ConfigError(
            f"alert.to={masked(target)}: no URL that apprise can send to; it lists them at "
            "https://appriseit.com/services"
        )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"alert.to: a command cannot be read: {error}") from None


def outside(run: RunDir) -> None:
    """Send what nobody has sent: all ranks may have been killed."""
    if run.secrets.exists():
        look_once(run.path)

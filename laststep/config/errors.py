"""The errors that users see as one line, and helpers for that line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """The command or the configuration is wrong. The message is one line: the field, the value and the fix."""


class Unanswered(ConfigError):
    """Slurm has not said whether it has taken a job: it may be in the queue. The message is one line."""


class DiskError(OSError):
    """A disk does not show what it should, perhaps only now or only on this host. The message is one line.

    It proves nothing about what is on the disk: a folder that cannot be listed is not empty.
    """


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or could not be written. The message is one line."""


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite, and train.nonfinite=fail. The message is one line."""


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint for a wrong name: the most similar valid name, else up to 12 names to choose from."""
    if not names:
        return "there is none to choose from"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose from {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n")[0]

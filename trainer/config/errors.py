"""ConfigError, raised for a wrong command or configuration, and helpers for its one-line message."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """The command or the configuration is wrong. The message is one line: the field, the value and the fix."""


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

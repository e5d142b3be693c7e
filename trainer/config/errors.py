"""ConfigError: what a wrong command or configuration raises; and the nearest valid name for a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """The command or the configuration is wrong: one line that names the field, the value and the fix."""


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint for a wrong name: the nearest valid one, else some or all of them."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose from {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().split("\n")[0]

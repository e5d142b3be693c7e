"""Keys whose values nobody may read who can read a run: webhooks and the like (`setting(..., secret=True)`).

Before anything is shown or written, `set_apart` puts masks in their place: `slack://***`. Only `write` writes them, to
a file of the run folder that its owner alone may read. A configuration that is read again has the masks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from laststep.config.keys import fields_of, known_fields, replaced
from laststep.rundir import aside

T = TypeVar("T")
MASK = "***"
_apart: dict[str, list[str]] = {}  # the values that this process has set apart last, by key


def masked(value: str) -> str:
    """What may be shown of a value: of a URL its scheme. A mask stays as it is."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value)
    return f"{scheme[0] if scheme else ''}{MASK}"


def is_mask(value: str) -> bool:
    """Whether this stands for a value that is kept elsewhere."""
    return value == masked(value)


def masked_words(words: Sequence[str]) -> list[str]:
    """What was typed, as it may be shown."""
    keys = [key for key, field in known_fields().items() if field.metadata.get("secret")]
    return [f"{key}={MASK}" if (key := word.partition("=")[0]) in keys else word for word in words]


def set_apart(config: T) -> T:
    """The configuration with masks for its secrets, which the next `write` writes."""
    _apart.clear()
    for key, field, value in fields_of(config):
        if field.metadata.get("secret") and value and not all(map(is_mask, value)):
            _apart[key] = list(value)
            config = replaced(config, key.split("."), [masked(each) for each in value])
    return config


def forget() -> None:
    """What follows is no run of the user's: write nothing."""
    _apart.clear()


def write(path: Path) -> None:
    """Write what was set apart, if anything was, readable by its owner alone. Raises OSError."""
    if not _apart:
        return
    temporary = aside(path)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as opened:
        json.dump(_apart, opened)
    temporary.replace(path)


def read(path: Path, key: str) -> list[str]:
    """The values of a key; none where nothing was set apart, or may be read."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [str(value) for value in kept.get(key, [])]

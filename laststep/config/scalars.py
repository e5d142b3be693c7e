"""Scalars as they were written. YAML reads 1.10 as a number, yes as true and 4:00:00 as 14,400; a name is none of them.

So each text is read twice: by OmegaConf, for the keys that hold numbers, and with every scalar kept as text, for the
keys that hold strings.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from laststep.config.errors import ConfigError

TEXT = ("str", "str | None", "dict[str, str]")
TIME_KEY, SBATCH_OPTIONS = "launch.time_min", "launch.slurm"
TIME_FORMATS = "minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as in sbatch"


def as_written(text: str) -> Any:
    """A YAML text, with each of its scalars as a string."""
    return yaml.load(text, Loader=yaml.BaseLoader)


def value_of(key: str, kind: str | None, value: Any, written: Any) -> Any:
    """The value of a key of this type (None: not a key), read by OmegaConf as `value`, from the text `written`.

    Raises ConfigError for a time limit that sbatch would not take.
    """
    if key == TIME_KEY and isinstance(written, str) and not isinstance(value, (bool, float, type(None))):
        return minutes(written)
    if kind == "list[str]" and isinstance(value, list):
        return [_text(*pair) for pair in zip(value, written)]
    if kind in TEXT or (key.startswith(f"{SBATCH_OPTIONS}.") and not isinstance(value, bool)):
        return _text(value, written)
    return value


def minutes(text: str) -> int:
    """A time limit in minutes, rounded up, from any of Slurm's formats (man sbatch, --time). Raises ConfigError."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    days = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", text)
    clock = re.fullmatch(r"(?:(\d+):)?(\d+):(\d+)", text)
    if days:
        d, h, m, s = (int(part or 0) for part in days.groups())
    elif clock:
        d, (h, m, s) = 0, (int(part or 0) for part in clock.groups())
    else:
        raise ConfigError(f"{TIME_KEY}={text}: must be {TIME_FORMATS}")
    return 24 * 60 * d + 60 * h + m + -(-s // 60)


def _text(value: Any, written: Any) -> Any:
    """Replace what YAML took for a number, a date or a truth value by its text. Quoted text and null stay."""
    return written if isinstance(written, str) and not isinstance(value, (str, list, dict, type(None))) else value

"""setting: a field of the schema, with its help text and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any


def setting(default: Any, help: str, *, choices: Sequence[str] = (), least: float | None = None) -> Any:
    """A field with its help text and its limits: the allowed values, or the least one. Checks and docs use them."""
    metadata = {"help": help, "choices": tuple(choices), "least": least}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)

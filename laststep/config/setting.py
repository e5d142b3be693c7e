"""How a key of the configuration is declared: a field of a dataclass, with its help text and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any


def setting(
    default: Any, help: str, *, choices: Sequence[str] = (), least: float | None = None, secret: bool = False
) -> Any:
    """A field with its help text and its limits: the allowed values, or the least one. Checks and docs use them. What
    is `secret` is shown nowhere, see laststep.config.secret."""
    metadata = {"help": help, "choices": tuple(choices), "least": least, "secret": secret}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)

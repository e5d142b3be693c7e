"""A problem that doctor has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that could break a run, and how to fix it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"

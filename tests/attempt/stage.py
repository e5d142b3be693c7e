"""A rescue on the stage: its survivors do their rounds one after another, as fast as they can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laststep.attempt import rescue as rescue_module
from laststep.attempt.rescue_plan import Plan
from laststep.checkpoint import files
from laststep.ranks import disk
from laststep.ranks.seal import Seal

SEAL = Seal()


class Died(Exception):
    """A survivor dies here."""


def dies() -> None:
    raise Died


def set_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds take no time here."""
    monkeypatch.setattr(files, "STRIPE_BYTES", 1024)  # a stripe for each rank that holds a shard
    monkeypatch.setattr(disk, "SHORTEST_ROUND_S", 0.25)  # fewer rounds in a minute
    monkeypatch.setattr(rescue_module, "monotonic", lambda: 0.0)  # however long they take here


class Rounds:
    """A rescue among `size` ranks. A survivor has a `rescue`, and does by `work` what is to be done, if anything."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder / "rescue", size
        self.recorded: list[tuple[int, Plan]] = []
        self.living: list[Any] = []

    def rounds(self, count: int = 1) -> None:
        """Each living survivor does a round, and then what is to be done."""
        for _ in range(count):
            for one in list(self.living):
                if one in self.living and not one.rescue.is_over:
                    one.rescue.round()
                    try:
                        one.work()
                    except Died:
                        one.die()

    def pass_s(self, seconds: float) -> None:
        """This much time passes."""
        self.rounds(round(seconds / self.living[0].rescue.round_s))

    def end(self, within_s: float = 60.0) -> Plan:
        """All living survivors leave in time; returns the plan that was recorded."""
        for _ in range(round(within_s / self.living[0].rescue.round_s)):
            if all(one.rescue.is_over for one in self.living):
                break
            self.rounds()
        else:
            raise AssertionError(f"{len(self.living)} survivors are still waiting after {within_s} s")
        ranks = [one.rank for one in self.living]
        assert self.recorded, f"the survivors {ranks} left, and none of them recorded the end"
        return self.recorded[-1][1]

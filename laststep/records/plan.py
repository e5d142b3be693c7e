"""plan.json: how long a run is. It is written once the data sets are known."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, cast

from laststep.records.metrics import read_lines


class Plan(TypedDict):
    """How long a run is."""

    total_steps: int
    batch_size: int  # samples per step, over all ranks


def read_plan(path: Path) -> Plan | None:
    """The plan of a run; None when it is not there yet, or damaged."""
    plans = (line for line in read_lines(path) if Plan.__required_keys__ <= line.keys())
    return cast("Plan | None", next(plans, None))

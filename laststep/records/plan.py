"""plan.json: how long a run is. It is written once the data sets are known."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TypedDict, cast

from laststep.config.errors import ConfigError
from laststep.records.metrics import read_lines
from laststep.rundir import aside


class Plan(TypedDict):
    """How long a run is."""

    total_steps: int
    batch_size: int  # samples per step, over all ranks


def read_plan(path: Path) -> Plan | None:
    """The plan of a run; None when it is not there yet, or damaged."""
    plans = (line for line in read_lines(path) if Plan.__required_keys__ <= line.keys())
    return cast("Plan | None", next(plans, None))


def write_fingerprint(path: Path, fingerprint: str) -> None:
    """Record what a run begins with, in one step. Without the record, nothing is checked later."""
    temporary = aside(path)
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps({"fingerprint": fingerprint}) + "\n")
        temporary.replace(path)


def check_fingerprint(path: Path, fingerprint: str, what: str) -> None:
    """Raise ConfigError, which names `what`, if the run has begun with other data than these."""
    try:
        before = str(json.loads(path.read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if before != fingerprint:
        raise ConfigError(
            f"{what}: the data have changed since the run began (fingerprint {before[:12]} then, {fingerprint[:12]} "
            "now); put back what it began with, or start a new run"
        )

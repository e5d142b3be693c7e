"""Small files of one fact each: plan.json, how long a run is; data.json, what data it has begun with; given.json, which
keys the user has set."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

from laststep.config.errors import ConfigError
from laststep.records.metrics import read_lines
from laststep.rundir import write_whole


class _Length(TypedDict):
    total_steps: int
    batch_size: int  # samples per step, over all ranks


class Plan(_Length, total=False):
    """How long a run is."""

    samples: int  # in the training set, where their order follows from the configuration and the step alone


def read_plan(path: Path) -> Plan | None:
    """The plan of a run; None when it is not there yet, or damaged."""
    plans = (line for line in read_lines(path) if _Length.__required_keys__ <= line.keys())
    return cast("Plan | None", next(plans, None))


def write_given(path: Path, keys: Sequence[str]) -> None:
    """Record which keys the user has set for a run, in given.json. Raises OSError."""
    path.write_text(json.dumps(list(keys)) + "\n")


def read_given(path: Path) -> list[str]:
    """The keys that the user has set for a run; none where that is not recorded, as by an older version."""
    try:
        keys = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


def write_fingerprint(path: Path, fingerprint: str) -> None:
    """Record what a run begins with, in one step. Without the record, nothing is checked later."""
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps({"fingerprint": fingerprint}) + "\n")


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

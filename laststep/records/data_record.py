"""data.json: the fingerprint of the data that a run trains on, so that it is not resumed with others."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from laststep.config.errors import ConfigError
from laststep.rundir import aside


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

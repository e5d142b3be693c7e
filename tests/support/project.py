"""The project's folder, and how its ranks get collectives that do not fail when a peer dies."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
# Either makes gloo silent, see tests/silent/silent_backend.py: this folder on PYTHONPATH for ranks that are started as
# commands, this variable for those that are forked from a test process (tests/support/ranks.py).
SILENT_PATH = str(PROJECT / "tests" / "silent")
SILENT = "LASTSTEP_TEST_SILENT"

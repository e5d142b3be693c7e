"""The record of one attempt, as attempts.jsonl has it."""

from __future__ import annotations

from typing import Any

AttemptRecord = dict[str, Any]

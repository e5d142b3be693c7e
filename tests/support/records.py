"""Records of attempts, with every field, for tests of the code that reads them."""

from __future__ import annotations

from typing import Any, cast

from trainer.records.attempt_record import EndedAttempt


def ended_attempt(**fields: Any) -> EndedAttempt:
    """The record of an attempt that finished ten steps on one node; `fields` are the ones that the test is about."""
    record = {
        "attempt": 0,
        "job_id": "7",
        "restart": 0,
        "hosts": ["n1"],
        "world_size": 1,
        "start": 1.0,
        "end": 2.0,
        "start_step": 0,
        "end_step": 10,
        "reason": "finished",
        "lost_steps": 0,
        "lost_s": 0.0,
        "step_s": 0.1,
        "requeue": False,
        "error": None,
    }
    assert fields.keys() <= record.keys()
    return cast("EndedAttempt", record | fields)

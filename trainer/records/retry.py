"""The retry policy: whether a run goes on by itself after an attempt has ended."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.schema import Launch
from trainer.records.attempt_record import AttemptRecord

FAILURES = ("failed", "hung", "lost")


def goes_on(records: Sequence[AttemptRecord], launch: Launch, retry: bool = True) -> bool:
    """Whether the run goes on by itself after the end that stands last in `records`; what it is allowed counts per job.

    `retry` is False when a failure would only repeat.
    """
    last = records[-1]
    of_job = [record for record in records if record["job_id"] == last["job_id"]]
    if last["reason"] in FAILURES:
        barren = [record for record in of_job if record["reason"] in FAILURES and not _made_progress(record)]
        return retry and (_made_progress(last) or len(barren) <= launch.max_failures)
    if last["reason"] == "timeout":
        return sum(record["reason"] == "timeout" for record in of_job) <= launch.max_timeouts
    return bool(last["reason"] == "preempted")


def spent(launch: Launch) -> str:
    """Why a run does not go on by itself, although it was to."""
    return f"launch.max_timeouts={launch.max_timeouts} or launch.max_failures={launch.max_failures} is spent"


def _made_progress(record: AttemptRecord) -> bool:
    """Whether a later step was kept than the attempt began at."""
    return bool(record["end_step"] - record["lost_steps"] > record["start_step"])

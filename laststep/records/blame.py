"""Which nodes the ends of a run's attempts blame, and which of them it leaves (launch.exclude_after)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from laststep.records.attempt_record import AttemptRecord

EXPIRES_S = 86_400.0  # a node may have been repaired since


def times_blamed(records: Iterable[AttemptRecord], now: float) -> Counter[str]:
    """How many attempts of the last day have blamed each node, by its name."""
    recent = (record for record in records if record["end"] and record["end"] > now - EXPIRES_S)
    return Counter(host for record in recent for host in dict.fromkeys(record["blamed"]))


def excluded_nodes(records: Iterable[AttemptRecord], exclude_after: int | None, now: float) -> list[str]:
    """The nodes that were blamed that often, the most often blamed first."""
    if exclude_after is None:
        return []
    return [host for host, times in times_blamed(records, now).most_common() if times >= exclude_after]

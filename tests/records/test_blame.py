"""Which nodes a run has blamed, and which it leaves."""

from __future__ import annotations

import pytest

from laststep.records.attempt_record import EndedAttempt, OpenAttempt
from laststep.records.retry import EXPIRES_S, excluded_nodes, times_blamed
from tests.support.records import ended_attempt

NOW = 1_000_000.0


def blamed(*hosts: str, ago_s: float = 60.0) -> EndedAttempt:
    return ended_attempt(reason="failed", blamed=list(hosts), end=NOW - ago_s)


@pytest.mark.parametrize(
    ("records", "exclude_after", "excluded"),
    [
        ([], 1, []),
        ([blamed("n2")], 2, []),
        ([blamed("n2"), blamed("n2")], 2, ["n2"]),
        ([blamed("n2"), blamed(), blamed("n1"), blamed("n2")], 2, ["n2"]),
        ([blamed("n1", "n2"), blamed("n2"), blamed("n3")], 1, ["n2", "n1", "n3"]),  # the worst first
        ([blamed("n2"), blamed("n2")], None, []),
        ([blamed("n2", ago_s=EXPIRES_S + 1), blamed("n2")], 2, []),  # it may have been repaired
        ([blamed("n2", "n2")], 2, []),  # two ranks on one node are one fault
    ],
)
def test_excluded(records: list[EndedAttempt], exclude_after: int | None, excluded: list[str]) -> None:
    assert excluded_nodes(records, exclude_after, NOW) == excluded


def test_an_attempt_under_way_blames_nobody() -> None:
    """Its record has no end, and no reason."""
    open_one: OpenAttempt = {**ended_attempt(blamed=["n1"]), "end": None, "reason": None}
    assert not times_blamed([open_one], NOW)

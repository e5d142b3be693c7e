"""A node that loses power is noticed long before launch.hang_timeout_s; one that lives is not taken for dead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import pytest

from laststep.ranks import watchdog as neighbour
from laststep.ranks.watchdog import Neighbour, host_answers
from tests.support.project import wait_until
from tests.support.records import a_world

ROUNDS = 12  # of silence, after which a host is dead


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "ASK_EVERY_S", 0.001)
    monkeypatch.setattr(neighbour, "DEAD_AFTER_S", 0.001 * ROUNDS)


class Host:
    """A host that answers as scripted, and whether the run gets on meanwhile."""

    def __init__(self, answers: Sequence[bool], then: bool, gets_on: bool = False) -> None:
        self.asked, self.ticks, self.gets_on = 0, 0, gets_on
        self._answers: Iterator[bool] = chain(answers, repeat(then))
        self.seen = Neighbour("n2", lambda: self.ticks, self._answer)

    def _answer(self, host: str) -> bool:
        assert host == "n2"
        self.asked += 1
        self.ticks += self.gets_on
        return next(self._answers)

    def lives(self) -> bool:
        """Whether it is still asked, and alive, after many rounds."""
        wait_until(lambda: self.asked > 10 * ROUNDS, "the neighbour is no longer asked")
        self.seen.close()
        return not self.seen.is_dead


def test_a_power_cut() -> None:
    """The host answers no more, and every rank is stuck."""
    host = Host([True, True], then=False)
    wait_until(lambda: host.seen.is_dead, "a dead host was not noticed")
    assert host.asked > ROUNDS


@pytest.mark.parametrize(
    ("answers", "then", "gets_on"),
    [
        ([], True, False),  # the run is stuck for another reason, or just waits
        ([True, *[False] * (ROUNDS - 2)], True, False),  # a switch restarts
        ([], False, False),  # a firewall, or a name that does not resolve
        ([True], False, True),  # the ranks use another network, which works
    ],
)
def test_a_host_that_lives(answers: Sequence[bool], then: bool, gets_on: bool) -> None:
    assert Host(answers, then, gets_on).lives()


def test_hosts_answer() -> None:
    """A refusal is an answer, an address that nobody has (RFC 5737) or a name that does not exist gives none."""
    assert host_answers("127.0.0.1")
    assert not host_answers("no-such-host.invalid")


def test_who_asks_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of each node asks the next node, the last one the first. On one host nobody asks."""
    monkeypatch.setattr(neighbour, "host_answers", lambda host: True)

    def asked(*hosts: str) -> list[str | None]:
        worlds = (a_world(rank=rank, size=len(hosts), hosts=hosts, local_size=1, nodes=2) for rank in range(len(hosts)))
        found = [Neighbour.of(world, lambda: 0) for world in worlds]
        return [one.host if one else None for one in found]

    assert asked("n1", "n1", "n2", "n2", "n3") == ["n2", None, "n3", None, "n1"]
    assert asked("n1", "n1") == [None, None]

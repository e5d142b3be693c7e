"""Ranks on two hosts that share the run by a network file system, whose clients remember names for minutes.

What one host creates, the other would see only once its memory of the folder has expired; here that is never, within a
test. The next attempt may begin on another host than the one that saved last.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.clients import Client, Clients, OnItsNode, missing
from tests.support.needs import require
from tests.support.ranks import Attempt, fingerprint
from tests.support.runs import FAULTY, KILLED, config, undisturbed

REMEMBERED_S = 3600.0


@pytest.fixture(scope="module")
def clients(root: Path) -> Iterator[Clients]:
    """Two hosts that share the folder of all runs."""
    require(missing())
    with Clients(root, 2, REMEMBERED_S) as clients:
        yield clients


@pytest.mark.parametrize("fault", ["kill step 6 rank 0", "kill step 6 rank 1", "halt step 6 rank 0"])
def test_the_next_attempt_begins_at_the_rescued_step(root: Path, clients: Clients, fault: str) -> None:
    """A rank dies, or freezes, and the other one, on another host, saves the last step. The next attempt's rank 0 is on
    the host of the first, which has listed the checkpoints when there was none: it must not begin at step 0, cut the
    metrics, and say that nothing was lost. Also the ranks meet, although each host believes that there is no address.
    """
    name, hit = fault.replace(" ", "-"), int(fault[-1])
    small, run = config(root, name, 2, FAULTY), RunDir(root / name)
    run.checkpoints.mkdir(parents=True)
    attempt = Attempt(small, {"LASTSTEP_TEST_FAULT": fault}, nodes=2, before=on(clients))
    attempt.wait_for_end(1 - hit)
    if fault.startswith("halt"):
        attempt.signal(signal.SIGKILL, hit)  # as its supervisor would
    assert attempt.wait() == [KILLED if rank == hit else 1 for rank in range(2)], attempt.output()
    following = Attempt(small, nodes=2, before=on(clients[:: -1 if hit else 1]))
    assert following.wait() == [0, 0], following.output()
    first, second = read_lines(run.attempts)
    assert (first["end_step"], first["lost_steps"], second["start_step"]) == (5, 0, 5), following.output()
    assert fingerprint(run) == undisturbed(2, ())


def on(clients: Sequence[Client]) -> OnItsNode:
    """Each node of an attempt is one of these hosts."""
    return OnItsNode(tuple(clients))

"""The run's lock between hosts that share it by a network file system."""

from __future__ import annotations

from pathlib import Path

from tests.support.clients import Clients, missing
from tests.support.needs import require
from tests.support.worlds import a_world
from trainer.world import run_lock

REMEMBERED_S = 3600.0


def test_other_hosts_read_who_holds_it(tmp_path: Path) -> None:
    """Rank 0 keeps the file open for as long as it lives, frozen perhaps. If what it has written stayed on its host, no
    rank on another one could save its step: it must know that the lock is its own attempt's."""
    require(missing())
    ours, other = a_world(size=2), a_world(size=2, job_id="8")
    with Clients(tmp_path, 2, REMEMBERED_S) as (host, another):
        lock = another.view / "lock"
        assert not lock.exists(), "the other host believes that there is no lock"
        run_lock.acquire(host.view / "lock", ours)
        assert run_lock.still_ours(lock, ours) and not run_lock.still_ours(lock, other)
        assert run_lock.current_holder(lock) == run_lock.signature(ours)

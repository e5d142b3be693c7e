"""The agreement on the last tick ends when it is no longer needed."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.support.waiting import wait_until
from tests.support.worlds import a_world
from trainer.world.seal import Seal
from trainer.world.sealed_store import SealedStore
from trainer.world.signals import Signals
from trainer.world.stop import Stop


@pytest.mark.parametrize("sealed", [False, True])
def test_it_does_not_wait_for_a_dead_rank_once_it_is_closed(sealed: bool) -> None:
    """srun sends SIGTERM to the other ranks when one is killed. They would stay for seconds after they have saved, and
    the ranks could not start again in the same allocation."""
    raw: dist.Store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9)
    )
    failures: list[str] = []
    stop = Stop(a_world(0, 2), SealedStore(raw, Seal()) if sealed else raw, Signals(), failures.append)
    stop._notify(signal.SIGTERM)
    wait_until(lambda: stop.signal is not None, "the rank's own notice was not read")
    began = time.monotonic()
    stop.close()
    assert time.monotonic() - began < 3 and not stop._thread.is_alive() and not failures

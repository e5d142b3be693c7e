"""Rank 0 notices the death of a rank at once, without a collective that fails, a supervisor or a file.

Under NCCL nothing else would tell it: the survivors would wait for launch.hang_timeout_s, and the steps since the last
save would be lost where something else ends the attempt first.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from laststep.ranks.seal import Seal
from laststep.ranks.store import SealedStore
from laststep.ranks.watchdog import KEY, Lifeline, Lifelines
from tests.support.project import DEADLINE_S, wait_until
from tests.support.ranks import forked
from tests.support.records import a_world

SECRET = b"s" * 32
WORLD = a_world(size=3, hosts=("here", "here", "here"))


class Rank0:
    """Rank 0's lifelines, and the ranks whose ends it was told of."""

    def __init__(self) -> None:
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = SealedStore(self.tcp, Seal(SECRET))
        self.lines = Lifelines(WORLD, "127.0.0.1", self.store, Seal(SECRET), self.ended.put)

    def knows(self, *ranks: int) -> None:
        """Wait until these ranks have connected."""
        wait_until(lambda: set(self.lines._ranks.values()) == set(ranks), f"ranks {ranks} have not connected")


@pytest.fixture
def rank_0() -> Iterator[Rank0]:
    found = Rank0()
    yield found
    found.lines.close()


def connect(port: int, rank: int) -> Lifeline:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return Lifeline(replace(WORLD, rank=rank), "127.0.0.1", SealedStore(store, Seal(SECRET)), Seal(SECRET))


def hold(port: int, rank: int, child: bool = False) -> None:
    """A rank that waits to be killed; with `child` beside a child that outlives it."""
    line = connect(port, rank)
    wait_until(lambda: line._socket is not None, "not connected")
    if child and not os.fork():
        time.sleep(DEADLINE_S)
        os._exit(0)
    while True:
        time.sleep(DEADLINE_S)


@pytest.mark.parametrize("child", [False, True], ids=["alone", "with a child that lives on"])
def test_a_killed_rank(rank_0: Rank0, child: bool) -> None:
    """The kernel closes its connection. A forked child has a copy of every connection of its parent, and would keep
    this one open: the death would go unnoticed for as long as the child lives."""
    rank = forked(hold, rank_0.tcp.port, 2, child)
    rank_0.knows(2)
    os.kill(rank.pid or 0, signal.SIGKILL)
    assert rank_0.ended.get(timeout=DEADLINE_S) == 2
    rank.join(DEADLINE_S)


def test_an_orderly_end_is_no_death(rank_0: Rank0) -> None:
    """At the end of a run its ranks leave one after another: a fault would be recorded for a run that has finished."""
    lines = [connect(rank_0.tcp.port, rank) for rank in (1, 2)]
    rank_0.knows(1, 2)
    lines[0].close()
    rank_0.knows(2)
    lines[1].close()
    rank_0.knows()
    assert rank_0.ended.empty()


def test_strangers(rank_0: Rank0) -> None:
    """A port scanner, another job, and one that speaks for a rank without the attempt's seal, or for one that is there:
    none of them may end a run."""
    port = rank_0.tcp.port
    line = connect(port, 1)
    rank_0.knows(1)
    place = rank_0.lines._listener.getsockname()
    key = f"{KEY}/{rank_0.lines._nonce}"
    for said in (b"", b"GET / HTTP/1.1\r\n", b"x" * 5000, Seal(b"t" * 32).seal(key, "2") + b"\n"):
        with socket.create_connection(place) as stranger:
            stranger.sendall(said)
    with socket.create_connection(place) as again:
        again.sendall(Seal(SECRET).seal(key, "1") + b"\n")
        assert again.recv(1) == b"", "rank 1 is there already"
    other = connect(port, 2)
    rank_0.knows(1, 2)
    assert rank_0.ended.empty()
    line.close()
    other.close()
    rank_0.knows()
    assert rank_0.ended.empty()


def test_rank_0_leaves_first(rank_0: Rank0) -> None:
    """A rank that leaves after rank 0 has nothing to say, and nobody to say it to."""
    line = connect(rank_0.tcp.port, 1)
    rank_0.knows(1)
    rank_0.lines.close()
    line.close()
    assert rank_0.ended.empty()

"""Copies of a shard on their way to another node: one counts only when it is complete, and no wait is without limit.

The ranks are objects in this process; their threads and sockets are real.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from laststep.ranks.meeting import SealedStore
from laststep.ranks.replicas import _HEADER, Copy, ReplicaLink
from laststep.ranks.seal import Seal
from laststep.ranks.world import Moment
from tests.support.project import DEADLINE_S, wait_until
from tests.support.records import a_world

BYTES = 200_000


def moment_of(step: int) -> Moment:
    return (step, 0, False, False)


def copy_of(rank: int, step: int, count: int = BYTES) -> Copy:
    return Copy(moment_of(step), memoryview(bytearray(random.Random(100 * step + rank).randbytes(count))))


def allocate(count: int) -> memoryview:
    return memoryview(bytearray(count))


Links = Callable[..., list[ReplicaLink]]


@pytest.fixture
def links() -> Iterator[Links]:
    """Makes the links of all ranks of two nodes."""
    seal = Seal()
    servers: list[dist.Store] = []  # serve as long as they are referenced
    with ExitStack() as closing:

        def make(size: int, allocate: Callable[[int], memoryview] = allocate) -> list[ReplicaLink]:
            server = dist.TCPStore("localhost", 0, None, True, timedelta(seconds=DEADLINE_S), wait_for_workers=False)
            servers.append(server)
            store = SealedStore(server, seal)
            worlds = [
                a_world(rank, size, nodes=2, local_size=size // 2, local_rank=rank % (size // 2), node=rank * 2 // size)
                for rank in range(size)
            ]
            made = [ReplicaLink(world, store, seal, allocate) for world in worlds]
            for link in made:
                closing.callback(link.close)
            return made

        yield make


def test_each_keeps_the_newest_copies_of_its_sender(links: Links) -> None:
    """On the other node: the last two, since the sender may have been a step ahead of the others when it died."""
    ranks = links(4)
    before: list[Copy] = []
    for step, count in ((10, BYTES), (20, BYTES), (30, BYTES + 64), (40, 0)):  # a shard may even be empty
        copies = [copy_of(rank, step, count) for rank in range(4)]
        for link, copy in zip(ranks, copies):
            link.send(copy)
        for rank, link in enumerate(ranks):
            assert link.wait(DEADLINE_S) and link.error is None
            expected = [*before[rank : rank + 1], copies[rank]]
            assert ranks[(rank + 2) % 4]._kept == expected, "the keeper has exactly what was sent"
        before = copies
    assert ranks[0].freeze(0.0) == [copy_of(2, 30, BYTES + 64), copies[2]]


def test_an_incomplete_copy_does_not_count(links: Links) -> None:
    """The sender is killed while its copy travels: what has come of it must not be taken for a state, nor must the
    complete copy before it be lost."""
    first, second = links(2)
    whole = copy_of(0, 10)
    first.send(whole)
    assert first.wait(DEADLINE_S)
    (to_keeper,) = [one for one in first._sockets if _is_connected_to(one, second)]
    to_keeper.sendall(_HEADER.pack(*moment_of(20), BYTES) + b"torn")
    wait_until(lambda: second._receiving, "the second copy is on its way")
    to_keeper.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: second._sender_left, "the keeper notices")
    assert second.freeze(DEADLINE_S) == [whole]


def _is_connected_to(one: socket.socket, other: ReplicaLink) -> bool:
    try:
        return bool(one.getpeername()[1] == port_of(other))
    except OSError:  # it listens, or is closed
        return False


def port_of(link: ReplicaLink) -> int:
    """Where the keeper of this link waits for its sender."""
    return int(json.loads(link._store.get(f"replica/{link._world.rank}"))["port"])


def test_a_keeper_dies(links: Links) -> None:
    """Training continues, and learns that there is no copy any more."""
    first, second = links(2)
    second.close()
    first.send(copy_of(0, 10))
    assert first.wait(DEADLINE_S) and first.error
    first.send(copy_of(0, 20))
    assert first.wait(0.0), "nothing is sent any more, so nothing is waited for"


def test_a_keeper_hangs(links: Links) -> None:
    """Its network, or its memory: whoever waits for it has a timeout, and can leave."""
    released = threading.Event()

    def hang(count: int) -> memoryview:
        released.wait(DEADLINE_S)
        return allocate(count)

    first, _ = links(2, hang)
    first.send(copy_of(0, 10, 64 << 20))
    assert not first.wait(0.2)
    first.give_up("rank 1 does not answer")
    assert first.wait(0.0) and first.error == "rank 1 does not answer"
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < DEADLINE_S / 6, "a thread in the middle of a copy ends at once"
    released.set()


def test_a_copy_that_was_given_up_never_counts(links: Links) -> None:
    """Training uses the memory of a copy again once it has given up on the keeper, while a thread may still read it. A
    keeper that is only slow would receive a mixture of two steps, and a rescue would commit that with valid hashes."""
    released = threading.Event()

    def slowly(count: int) -> memoryview:
        released.wait(DEADLINE_S)
        return allocate(count)

    first, second = links(2, slowly)
    copy = copy_of(0, 10, 64 << 20)  # more than the sockets' buffers hold
    first.send(copy)
    wait_until(lambda: second._receiving, "the copy is on its way")
    first.give_up("rank 1 does not answer")
    copy.data[:] = bytes(len(copy.data))
    released.set()
    wait_until(lambda: second._sender_left, "the keeper learns that no copy follows")
    assert second.freeze(0.0) == []


def test_a_copy_that_was_given_up_while_it_was_read(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst moment: the last bytes are read after training has given up, and all of them arrive."""
    first, second = links(2)
    shutdown = socket.socket.shutdown
    monkeypatch.setattr(socket.socket, "shutdown", lambda one, how: None)  # the order does not end the call in time
    given_up = threading.Event()

    sendall = socket.socket.sendall

    def late(one: socket.socket, data: memoryview) -> None:
        if len(data) == BYTES:
            first.give_up("rank 1 does not answer")
            data[:] = bytes(BYTES)
            given_up.set()
        sendall(one, data)

    monkeypatch.setattr(socket.socket, "sendall", late)
    first.send(copy_of(0, 10))
    assert given_up.wait(DEADLINE_S)
    monkeypatch.setattr(socket.socket, "shutdown", shutdown)
    first.close()
    wait_until(lambda: second._sender_left, "the keeper learns that no copy follows")
    assert second.freeze(0.0) == []


def test_given_up_before_there_is_a_connection(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that waits for the connection is not sent once there is one: its memory has been used again."""
    connect, go = ReplicaLink._connect, threading.Event()

    def late(link: ReplicaLink) -> socket.socket:
        assert go.wait(DEADLINE_S)
        return connect(link)

    monkeypatch.setattr(ReplicaLink, "_connect", late)
    first, second = links(2)
    first.send(copy_of(0, 10))
    first.give_up("rank 1 does not answer")
    go.set()
    wait_until(lambda: not first._threads[1].is_alive(), "the thread that sends ends")
    first.close()
    wait_until(lambda: second._sender_left, "the keeper learns that no copy follows")
    assert second.freeze(0.0) == []


def test_a_keeper_without_memory(links: Links, capfd: pytest.CaptureFixture[str]) -> None:
    """Its sender must not wait for it, and its own training goes on."""

    def refuse(count: int) -> memoryview:
        raise MemoryError("no memory left")

    first, second = links(2, refuse)
    first.send(copy_of(0, 10))
    assert first.wait(DEADLINE_S) and first.error
    assert second.freeze(0.0) == []
    said = ""

    def says_so() -> bool:
        nonlocal said
        said += capfd.readouterr().out
        return "keeps no copies of rank 0 any more" in said

    wait_until(says_so, "the keeper did not say so")


def test_a_stranger_is_refused(links: Links) -> None:
    """A port scan, or another user of the node: what it sends is never taken for a copy. It may come before the sender,
    or after it, when nobody is expected any more."""
    first, second = links(2)
    port = port_of(second)
    for line in (b"GET / HTTP/1.1\r\n", b"0" * 64 + b" 0\n"):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
            stranger.sendall(line)
            assert stranger.recv(1) in (b"-", b"")
    first.send(copy_of(0, 10))
    assert first.wait(DEADLINE_S) and first.error is None and second._kept == [copy_of(0, 10)]


def test_frozen(links: Links) -> None:
    """A rescue writes the copy: another one must not take its place in memory."""
    first, second = links(2)
    first.send(copy_of(0, 10))
    assert first.wait(DEADLINE_S)
    kept = second.freeze(0.0)
    for step in (20, 30):
        first.send(copy_of(0, step))
        first.wait(DEADLINE_S)
    assert kept == [copy_of(0, 10)]

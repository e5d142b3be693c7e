"""Lifelines: rank 0 notices the death of any other rank at once, whatever the collectives do.

gloo's survivors get an error when a peer dies; NCCL's get none, and wait forever. So each rank keeps a TCP connection
to rank 0 on which nothing is sent. However a process ends, the kernel closes its connections: rank 0 reads the end of
the stream. A rank that leaves in an orderly way says so first. The death of rank 0 needs no lifeline: it serves the
store.

What a connection cannot show is left to others: a node without power closes nothing (laststep/ranks/neighbour.py), and
a connection that the network has cut may be silent, or fail without a death. Only an end that the other side's kernel
has sent counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable

from laststep.ranks.address import named_address
from laststep.ranks.run_time import run_time
from laststep.ranks.seal import Seal
from laststep.ranks.sealed_store import SealedStore
from laststep.ranks.world import World
from laststep.say import say

KEY = "lifeline"
LEAVES = b"."
CONNECT_S = 30.0
LOOK_S = 0.05
LONGEST_LINE = 1024  # bytes of a connection's first line


class Lifelines:
    """Rank 0's ends, at the address `host` that its store has.

    `on_end` is called, in another thread, with the number of each rank whose process has ended.
    """

    def __init__(self, world: World, host: str, store: SealedStore, seal: Seal, on_end: Callable[[int], None]) -> None:
        self._size, self._seal, self._on_end = world.size, seal, on_end
        self._nonce = secrets.token_hex(8)
        self._listener = _listen(world, host)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for one in (self._listener, self._woken):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        self._said: dict[socket.socket, bytes] = {}  # the first lines of those that have not said who they are
        self._ranks: dict[socket.socket, int] = {}
        store.set(KEY, json.dumps({"port": self._listener.getsockname()[1], "nonce": self._nonce}))
        self._thread = threading.Thread(target=self._watch, name="lifelines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report no further end."""
        self._wake.close()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._woken:
                    return self._end()
                if one is self._listener:
                    self._accept()
                elif one in self._ranks:
                    self._read_end(one)
                else:
                    self._read_line(one)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connected, _ = self._listener.accept()
            connected.setblocking(False)
            self._said[connected] = b""
            self._selector.register(connected, selectors.EVENT_READ)

    def _read_line(self, one: socket.socket) -> None:
        """Read who this is. Anybody but a rank of this attempt, once, is refused."""
        data = b""
        with contextlib.suppress(OSError):
            data = one.recv(LONGEST_LINE)
        self._said[one] += data
        line, end, rest = self._said[one].partition(b"\n")
        if data and not end and len(line) < LONGEST_LINE:
            return
        del self._said[one]
        rank = self._seal.open(f"{KEY}/{self._nonce}", line) if end and not rest else None
        if rank is None or not 0 < int(rank) < self._size or int(rank) in self._ranks.values():
            return self._drop(one)
        self._ranks[one] = int(rank)

    def _read_end(self, one: socket.socket) -> None:
        try:
            ended = not one.recv(1)
        except ConnectionResetError:
            ended = True
        except OSError:  # of the network: nothing is known any more
            ended = False
        rank = self._ranks.pop(one)
        self._drop(one)
        if ended:
            self._on_end(rank)

    def _drop(self, one: socket.socket) -> None:
        self._selector.unregister(one)
        one.close()


class Lifeline:
    """Another rank's end. It connects in a thread, to the host at which this rank reaches rank 0."""

    def __init__(self, world: World, host: str, store: SealedStore, seal: Seal) -> None:
        self._rank, self._host, self._store, self._seal = world.rank, host, store, seal
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._connect, name="lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave: from now on the end of this process is no death."""
        self._closed.set()
        self._thread.join(timeout=5)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(LEAVES)
            self._socket.close()

    def _connect(self) -> None:
        deadline = run_time() + CONNECT_S
        try:
            while not self._store.check([KEY]):  # not `get`, which would wait in C
                if self._closed.wait(LOOK_S) or run_time() > deadline:
                    return
            place = json.loads(self._store.get(KEY))
            connected = socket.create_connection((self._host, place["port"]), timeout=CONNECT_S)
            # A child that outlived this process would keep the connection open, and nobody would notice the death.
            os.register_at_fork(after_in_child=connected.close)
            connected.sendall(self._seal.seal(f"{KEY}/{place['nonce']}", str(self._rank)) + b"\n")
            self._socket = connected
        except OSError as error:
            say(
                f"WARNING: rank {self._rank} cannot connect to rank 0 on {self._host} ({error}): where collectives do "
                "not fail, its death is noticed only after launch.hang_timeout_s"
            )
        except Exception:  # the store is gone, and with it rank 0
            return


def _listen(world: World, host: str) -> socket.socket:
    if address := named_address(world, host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=world.size)
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual_stack, backlog=world.size)

"""ReplicaLink: sends copies of this rank's shard to its keeper on another node, and keeps those of its sender.

Each rank has one keeper and one sender: the ranks at the same place of the next and the previous node. A copy travels
over a TCP connection of its own, from a thread to a thread, so training does not wait for it. The keeper has memory for
two copies, and keeps both until the next one begins to arrive: a sender that dies may have been a step ahead of the
other ranks. Sockets, not a process group: a thread that waits in one can be interrupted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from laststep.ranks.meeting import SealedStore, interfaces, listen
from laststep.ranks.process import start_thread
from laststep.ranks.seal import Seal
from laststep.ranks.world import Moment, World, hostname
from laststep.say import say

CONNECT_S = 30.0
CLOSE_S = 2.0
PIECE = 16 << 20  # bytes received by one call
BUFFER = 4 << 20  # of a socket, in bytes

_HEADER = struct.Struct("!qq??Q")  # the moment, and the number of bytes that follow
_TRAILER = struct.Struct("!QQ")  # the number of the copy on this connection, from 1, and of the bytes that it had
_ANSWER = struct.Struct("!q")  # the step


class Copy(NamedTuple):
    """A complete copy of a shard of the state."""

    moment: Moment
    data: memoryview


def keeper_of(rank: int, world: World) -> int:
    """The rank that keeps this rank's copies: that at its place on the next node."""
    return (rank + world.local_size) % world.size


class ReplicaLink:
    """This rank's connections to its keeper and to its sender. `allocate` returns memory of a size in bytes. If a
    connection fails, `error` says why, and no further copy is sent; training continues."""

    def __init__(self, world: World, store: SealedStore, seal: Seal, allocate: Callable[[int], memoryview]) -> None:
        self.error: str | None = None
        self._world, self._allocate = world, allocate
        self.keeper = keeper_of(world.rank, world)
        self.sender = next(rank for rank in range(world.size) if keeper_of(rank, world) == world.rank)
        self._store, self._seal = store.clone(), seal
        self._changed = threading.Condition()  # guards the fields below
        self._to_send: Copy | None = None
        self._to_keeper: socket.socket | None = None
        self._sending = False
        self._kept: list[Copy] = []  # complete ones of the sender, at most two, the older first
        self._receiving = self._frozen = self._closed = self._sender_left = False
        self._sockets: list[socket.socket] = []
        listener = self._open(listen(""))
        self._nonce = secrets.token_hex(8)
        hosts = [hostname(), *(address for _, address in interfaces())]
        place = {"hosts": hosts, "port": listener.getsockname()[1], "nonce": self._nonce}
        self._store.set(f"replica/{world.rank}", json.dumps(place))
        self._threads = [
            start_thread("replica-keeper", lambda: self._keep(listener)),
            start_thread("replica-sender", self._send_all),
        ]

    # In the thread that trains

    def send(self, copy: Copy) -> None:
        """Start to send a copy, whose memory must not change until `wait` has returned True or `give_up` was called."""
        with self._changed:
            if self.error is None:
                self._to_send, self._sending = copy, True
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the keeper has the copy that was sent, or never will, see `error`. False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sending or self.error is not None, timeout_s)

    def give_up(self, why: str) -> None:
        """Send nothing any more. What has arrived of a copy that is on its way never counts."""
        with self._changed:
            self.error = self.error or why
            self._to_send = None
            to_keeper = self._to_keeper
            self._changed.notify_all()
        if to_keeper is not None:
            with contextlib.suppress(OSError):
                to_keeper.shutdown(socket.SHUT_RDWR)  # wakes the thread that sends, and the keeper

    # In any thread

    def freeze(self, timeout_s: float) -> list[Copy]:
        """Receive no further copy; returns those of the sender, at most two, the older first. One that is on its way
        has until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: not self._receiving or self._sender_left, timeout_s)
            self._frozen = True
            return list(self._kept)

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            opened = list(self._sockets)
        for one in opened:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it, which `close` does not
            one.close()
        for thread in self._threads:
            thread.join(CLOSE_S)

    # In the thread that sends

    def _send_all(self) -> None:
        try:
            keeper, number = self._connect(), 0
            with self._changed:
                self._to_keeper = keeper
            while (copy := self._next()) is not None:
                number += 1
                keeper.sendall(_HEADER.pack(*copy.moment, len(copy.data)))
                keeper.sendall(copy.data)
                with self._changed:
                    if self.error is not None:  # training may have used the memory again while it was read
                        return
                keeper.sendall(_TRAILER.pack(number, len(copy.data)))
                (step,) = _ANSWER.unpack(_receive(keeper, _ANSWER.size))
                with self._changed:
                    self._sending = self._to_send is not None
                    self._changed.notify_all()
                if step != copy.moment[0]:
                    raise OSError(f"it has answered with step {step} instead of {copy.moment[0]}")
        except Exception as error:  # of any kind: training waits for this thread
            self.give_up(str(error) or type(error).__name__)

    def _next(self) -> Copy | None:
        """The next copy to send; None when the link is closed or given up. Waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._to_send is not None or self._closed or self.error is not None)
            copy, self._to_send = self._to_send, None
            return None if self._closed else copy

    def _connect(self) -> socket.socket:
        """Connect to the keeper. Raises OSError."""
        key = f"replica/{self.keeper}"
        deadline = time.monotonic() + CONNECT_S
        while not self._store.check([key]):  # not `get`, which would wait in C
            if self._closed or time.monotonic() > deadline:
                raise OSError("it has not published its address")
            time.sleep(0.02)
        place = json.loads(self._store.get(key))
        failure = "it has no address"
        here = {address for _, address in interfaces()}
        for host in sorted(place["hosts"], key=lambda host: host in here):  # an address of this host too leads back
            try:
                connected = self._open(socket.create_connection((host, place["port"]), timeout=CONNECT_S / 3))
                connected.sendall(self._seal.seal(f"{key}/{place['nonce']}", str(self._world.rank)) + b"\n")
                if _receive(connected, 1) == b"+":
                    connected.settimeout(None)
                    return connected
                failure = f"{host} is not it"
            except OSError as error:
                failure = f"{host}:{place['port']}: {error}"
        raise OSError(failure)

    # In the thread that keeps

    def _keep(self, listener: socket.socket) -> None:
        try:
            sender = self._accept(listener)
            listener.close()  # nobody else is expected
            self._keep_copies(sender)
        except OSError:  # the sender is gone, or this link is closed
            pass
        except Exception as error:  # such as MemoryError
            say(f"WARNING: this rank keeps no copies of rank {self.sender} any more: {error}")
        with self._changed:
            self._receiving, self._sender_left = False, True
            self._changed.notify_all()

    def _keep_copies(self, sender: socket.socket) -> None:
        with sender:
            for number in itertools.count(1):
                header = _receive(sender, _HEADER.size)
                with self._changed:
                    if self._frozen:
                        return
                    self._receiving = True
                    spare = self._kept.pop(0).data if len(self._kept) == 2 else None
                step, validated, over, finished, count = _HEADER.unpack(header)
                if spare is None or len(spare) != count:
                    spare = self._allocate(count)
                _receive_into(sender, spare)
                if _TRAILER.unpack(_receive(sender, _TRAILER.size)) != (number, count):
                    raise OSError("what follows a copy is not its trailer")
                with self._changed:
                    self._kept.append(Copy((step, validated, over, finished), spare))
                    self._receiving = False
                    self._changed.notify_all()
                sender.sendall(_ANSWER.pack(step))

    def _accept(self, listener: socket.socket) -> socket.socket:
        """The connection of the sender; any other is refused. Raises OSError."""
        while True:
            connected = self._open(listener.accept()[0])
            connected.settimeout(CONNECT_S / 3)
            with contextlib.suppress(OSError):
                line = _receive_line(connected)
                key = f"replica/{self._world.rank}/{self._nonce}"
                if self._seal.open(key, line) == str(self.sender):
                    connected.sendall(b"+")
                    connected.settimeout(None)
                    return connected
                connected.sendall(b"-")
            connected.close()

    def _open(self, opened: socket.socket) -> socket.socket:
        """Have `close` close it."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                opened.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        with self._changed:
            self._sockets.append(opened)
            if self._closed:
                opened.close()
        return opened


def _receive(connected: socket.socket, count: int) -> bytes:
    """`count` bytes. Raises OSError when the other side has left."""
    data = bytearray(count)
    _receive_into(connected, memoryview(data))
    return bytes(data)


def _receive_into(connected: socket.socket, data: memoryview) -> None:
    done = 0
    while done < len(data):
        count = connected.recv_into(data[done:], min(len(data) - done, PIECE), socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("it has left")
        done += count


def _receive_line(connected: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > 1024:
            raise OSError("not a rank")
        line += _receive(connected, 1)
    return line[:-1]

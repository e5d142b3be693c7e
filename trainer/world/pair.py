"""Two ranks on CPUs of one host average their gradients in memory that both see.

gloo sends gradients through sockets, also between two processes of one host, and each of its messages has to wake
threads of both. For a small model that takes longer than all else in a step. Here each rank puts its gradients where
the other one can read them, says so with a byte in a pipe, and both add up. A sum of two numbers does not depend on
their order, so the mean is that of gloo's all-reduce bit for bit, with two exceptions: one NaN may be another one, and
gloo's threads do not follow a torch.set_flush_denormal. With more ranks it would not be.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import sys
import tempfile
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainer.world.group import Group
from trainer.world.peer_loss import PeerLost

PART = 1 << 20  # bytes that are averaged at once, so few that they stay in a processor's cache
TOKEN_BYTES = 7  # as many as fit into an int64 with its sign
WORD = b"."


class Pair:
    """This rank and the other one. Each has memory for two parts.

    It reads from the pipe `told` that the other rank's part is there, and writes to the pipe `tell` that its own is.
    """

    def __init__(self, memory: list[Tensor], rank: int, told: int, tell: int, other: str) -> None:
        self._memory = memory  # of rank 0 and of rank 1, in bytes
        self._rank = rank
        self._told, self._tell, self._other = told, tell, other
        self._exchanges = 0
        weakref.finalize(self, _close, told, tell)

    @classmethod
    def of(cls, group: Group) -> Pair | None:
        """The two ranks of this group; None, on every rank, if they are not two on CPUs or cannot see each other's
        memory: on different hosts, or in containers that hide their processes from each other. A collective.

        Neither memory nor pipes have names, so nothing is left of them however the ranks end.
        """
        on_cpus = group.backend == "gloo" and group.device.type == "cpu"
        if sys.platform != "linux" or group.world.size != 2 or not on_cpus or len(set(group.world.hosts)) > 1:
            return None
        rank = group.world.rank
        own = _Offer()
        offers = [offer.tolist() for offer in group.gather(torch.tensor(own.numbers))]
        memory, tell = _accept(offers, 1 - rank)
        # An offer must stand until the other rank has accepted it, or could not. It has once this returns.
        everywhere = all(group.gather(torch.tensor(tell >= 0)))
        own.close()
        pair = cls(memory, rank, own.told, tell, f"rank {1 - rank} on {group.world.host_of(1 - rank)}")
        return pair if everywhere else None

    def register(self, ddp: DistributedDataParallel) -> None:
        """Average the gradients of this model from now on, as its communication hook."""
        ddp.register_comm_hook(None, lambda _, bucket: self._bucket_ready(bucket))  # DDP rejects annotations as text

    def _bucket_ready(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        for part in gradients.split(PART // gradients.itemsize):
            self._average(part)
        future = Future[Tensor]()
        future.set_result(gradients)
        return future

    def _average(self, part: Tensor) -> None:
        """Parts go to the two halves of the memory in turn. The half that is overwritten here was read by the other
        rank before it said that its previous part was there."""
        begin = self._exchanges % 2 * PART
        self._exchanges += 1
        both = [memory[begin : begin + part.nbytes].view(part.dtype) for memory in self._memory]
        torch.mul(part, 0.5, out=both[self._rank])  # before the sum, as DDP does
        self._meet()
        torch.add(*both, out=part)

    def _meet(self) -> None:
        """Wait until the other rank is here as well. Raises PeerLost."""
        os.write(self._tell, WORD)
        if not os.read(self._told, len(WORD)):
            raise PeerLost(f"{self._other} has ended")


class _Offer:
    """Memory and a pipe that another process of this user may open; -1 for what could not be had.

    os.memfd_create would do as well, but Pythons that were built with an old libc, such as conda's, lack it."""

    def __init__(self) -> None:
        self.told, self._tell, self._memory = -1, -1, -1
        token = secrets.token_bytes(TOKEN_BYTES)
        with contextlib.suppress(OSError):
            self.told, self._tell = os.pipe()
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                self._memory = os.dup(file.fileno())
            os.posix_fallocate(self._memory, 0, 2 * PART)  # else a host without memory would end the ranks by SIGBUS
            os.pwrite(self._memory, token, 0)
        self.numbers = (os.getpid(), self._memory, self._tell, int.from_bytes(token, "big"))

    def close(self) -> None:
        """It is open elsewhere now, or never will be. The end of the pipe at which this rank is told stays open."""
        _close(self._memory, self._tell)


def _accept(offers: list[list[int]], other: int) -> tuple[list[Tensor], int]:
    """The memory of both ranks, and the other one's pipe, to tell it something; nothing and -1 if this process cannot
    open them.

    The pipe is opened for reading as well. So it has a reader, even if the other rank has ended: writing to it then
    causes no SIGPIPE, which ends this process if the user's code has given it its default action."""
    with contextlib.suppress(OSError):
        memory = [_map(process, number, token) for process, number, _, token in offers]
        process, _, pipe, _ = offers[other]
        return memory, os.open(f"/proc/{process}/fd/{pipe}", os.O_RDWR | os.O_CLOEXEC)
    return [], -1


def _map(process: int, number: int, token: int) -> Tensor:
    """The memory that a process offers. Raises OSError if this process cannot see it."""
    path = Path(f"/proc/{process}/fd/{number}")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size != 2 * PART:
        raise FileNotFoundError(path)
    with path.open("r+b", buffering=0) as file:
        if file.read(TOKEN_BYTES) != token.to_bytes(TOKEN_BYTES, "big"):  # in containers, of another process
            raise FileNotFoundError(path)
        return torch.frombuffer(mmap.mmap(file.fileno(), 2 * PART), dtype=torch.uint8)


def _close(*numbers: int) -> None:
    for number in numbers:
        if number >= 0:
            os.close(number)

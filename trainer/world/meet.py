"""How the ranks of one attempt meet: rank 0 binds a free port and publishes it, the others read it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.world.detect import World

# Nodes of one job start seconds apart, on a busy cluster a minute (a slow prolog, a cold file system): the ranks wait
# at least so long for each other, however short `launch.hang_timeout_s` is.
MEETING_S = 60.0
POLL_S = 0.05
# What gloo, NCCL and the store say when a peer is no longer there.
OF_ABSENCE = re.compile("gloo|NCCL|Connection (closed|reset)|Broken pipe", re.IGNORECASE)
# How long the ranks wait for each other at the end, when all that matters is done.
FAREWELL_S = 10.0


class MeetingError(RuntimeError):
    """The ranks of an attempt did not find each other."""


class Absent(RuntimeError):
    """Another rank is no longer there."""


def is_of_absence(error: Exception) -> bool:
    """Whether an error says only that a peer is gone: then the peer's own error, if it had one, is what matters."""
    return isinstance(error, (Absent, dist.DistError)) or bool(OF_ABSENCE.search(str(error)))


class Group:
    """The ranks of one attempt, met. A world of one rank needs no process group and pays for none."""

    def __init__(self, world: World, store: dist.Store, device: torch.device) -> None:
        self.world = world
        self.store = store
        self.device = device
        self._barriers = 0

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """`tensor` of every rank, in rank order."""
        if self.world.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world.size)]
        dist.all_gather(parts, tensor)
        return parts

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, on every rank, added in rank order.

        An all-reduce may add in an order that depends on an element's place in the buffer, so the last bits of a
        metric would depend on how many steps were reduced together; here they do not.
        """
        return reduce(torch.add, self.gather(tensor))

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Give every rank the values that rank 0 holds, in place."""
        if self.world.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def tell(self, number: int | None) -> int | None:
        """The number that rank 0 has, on every rank."""
        if self.world.rank == 0:
            self.store.set("told", "" if number is None else str(number))
        told = self.store.get("told").decode()
        return int(told) if told else None

    def barrier(self, timeout_s: float) -> None:
        """Wait until every rank is here. Runs over the store, so it may last longer than a collective is allowed to."""
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        if self.store.add(key, 1) == self.world.size:
            self.store.set(f"{key}/open", "")
        self.store.wait([f"{key}/open"], timedelta(seconds=timeout_s))

    def rank_0_says(self, answer: bool) -> bool:
        """Rank 0's answer, on every rank. A collective."""
        flag = torch.tensor(answer, dtype=torch.uint8, device=self.device)
        self.broadcast([flag])
        return bool(flag)

    def node_by_node(self, work: Callable[[], None]) -> None:
        """Call `work` on one rank of each node, one node after another: downloads never race, even on a shared disk."""
        for node in range(self.world.nodes):
            if self.world.node == node and self.world.local_rank == 0:
                work()
            self.barrier(timeout_s=24 * 3600)

    def close(self) -> None:
        """Part, once every rank is through its last collective, though nobody waits long for one that may be dead.

        A rank that closed its connections sooner could cut off a peer that still reads from them.
        """
        with contextlib.suppress(dist.DistError):
            if self.store.add("parted", 1) == self.world.size:
                self.store.set("parted/all", "")
            self.store.wait(["parted/all"], timedelta(seconds=FAREWELL_S))
        if self.world.size > 1:
            dist.destroy_process_group()


def meet(world: World, device: torch.device, meeting: Path, timeout_s: float) -> Group:
    """Meet the other ranks and set up collectives: NCCL on GPUs, gloo on CPUs.

    `meeting` is a file of this attempt alone, on a file system that all ranks see. A MASTER_ADDR and MASTER_PORT
    in the environment win over it. A rank waits `timeout_s` for the others here, and twice that in a later collective:
    the watchdog, which can tell where each rank is stuck, comes first.

    Raises MeetingError when a rank does not come in time.
    """
    if world.size == 1:
        return Group(world, dist.HashStore(), device)
    patience = timedelta(seconds=max(MEETING_S, timeout_s))
    try:
        store = _store(world, meeting, patience)
        group = Group(world, store, device)
        _await_all(world, store, patience)  # before the collectives: NCCL would wait in C
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("collectives", store),
            rank=world.rank,
            world_size=world.size,
            timeout=2 * patience,
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        raise MeetingError(f"{world}: the ranks did not all meet within {patience.seconds} s: {error}") from error
    if world.rank == 0 and meeting.exists():
        meeting.unlink()
    return group


def _await_all(world: World, store: dist.Store, patience: timedelta) -> None:
    keys = [f"met/{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], "")
    try:
        store.wait(keys, patience)
    except dist.DistError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(f"rank {rank} on {world.host_of(rank)}" for rank in absent)
        raise MeetingError(f"{world}: {names} did not come within {patience.seconds} s") from None


def _store(world: World, meeting: Path, timeout: timedelta) -> dist.Store:
    """The key-value store that rank 0 serves to all."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, world.size, world.rank == 0, timeout, wait_for_workers=False)
    if world.rank == 0:
        # Port 0 lets the kernel pick a free one; the bound socket goes to the store, so nobody can take it in between.
        listener = socket.create_server(("", 0), backlog=2048)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "localhost", port, world.size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        meeting.parent.mkdir(parents=True, exist_ok=True)
        temporary = meeting.with_suffix(".tmp")
        # On one node no name needs to resolve: a laptop's or a container's own often does not.
        host = "localhost" if world.nodes == 1 else world.hosts[0]
        temporary.write_text(json.dumps({"host": host, "port": port}))
        temporary.replace(meeting)
        return store
    deadline = time.monotonic() + timeout.seconds
    while time.monotonic() < deadline:
        try:
            address = json.loads(meeting.read_text())
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        return dist.TCPStore(address["host"], address["port"], world.size, False, timeout, wait_for_workers=False)
    raise MeetingError(
        f"{world}: rank 0 on {world.hosts[0]} did not publish its address in {meeting} within {timeout.seconds} s"
    )

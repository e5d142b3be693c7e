"""How the ranks of one attempt meet: rank 0 binds a free port and publishes it, the others read it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.world.address import MeetingError, open_store, use_interface
from trainer.world.detect import World, hostname

# Nodes of one job start seconds apart, on a busy cluster a minute (a slow prolog, a cold file system): the ranks wait
# at least so long for each other, however short `launch.hang_timeout_s` is.
MEETING_S = 60.0
# What gloo, NCCL and the store say when a peer is no longer there.
OF_ABSENCE = re.compile("gloo|NCCL|Connection (closed|reset)|Broken pipe", re.IGNORECASE)
# How long the ranks wait for each other at the end, when all that matters is done.
FAREWELL_S = 10.0


class Absent(RuntimeError):
    """Another rank is no longer there."""


def is_of_absence(error: Exception) -> bool:
    """Whether an error says only that a peer is gone: then the peer's own error, if it had one, is what matters."""
    return isinstance(error, (Absent, dist.DistError)) or bool(OF_ABSENCE.search(str(error)))


class Group:
    """The ranks of one attempt, met, at `address`. A world of one rank needs no process group and pays for none."""

    def __init__(self, world: World, store: dist.Store, device: torch.device, address: str = "") -> None:
        self.world = world
        self.store = store
        self.device = device
        self.address = address
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

    def tell(self, what: str, number: int | None) -> int | None:
        """The number that rank 0 has of `what`, on every rank."""
        if self.world.rank == 0:
            self.store.set(f"told/{what}", "" if number is None else str(number))
        told = self.store.get(f"told/{what}").decode()
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


def meet(world: World, device: torch.device, meeting: Path, timeout_s: float, init_method: str | None = None) -> Group:
    """Meet the other ranks and set up collectives: NCCL on GPUs, gloo on CPUs.

    As in `torch.distributed.init_process_group`, `init_method` says where rank 0 is found: `tcp://HOST:PORT`, `env://`
    (MASTER_ADDR and MASTER_PORT), or `file://PATH`, in which rank 0 publishes the free port that it took, and every
    address of its host. The default is env:// where those two are set, else the file `meeting`, of this attempt alone.
    A rank waits `timeout_s` for the others here, and twice that in a later collective: the watchdog, which can tell
    where each rank is stuck, comes first.

    Raises MeetingError when a rank does not come in time, ConfigError when the address cannot be right.
    """
    if world.size == 1:
        return Group(world, dist.HashStore(), device)
    patience = timedelta(seconds=max(MEETING_S, timeout_s))
    try:
        store, address = open_store(world, meeting, init_method, patience)
        world = _introduce(world, store, f"{meeting} of {world.size} ranks", patience)
        use_interface(world, store)
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
    return Group(world, store, device, address)


def _introduce(world: World, store: dist.Store, purpose: str, patience: timedelta) -> World:
    """Wait for all ranks, before the collectives, where NCCL would wait in C; returns the world with their hosts."""
    met = store.compare_set("purpose", "", purpose).decode()
    if met != purpose:
        raise MeetingError(f"{world}: two jobs meet at one address: this one, for {purpose}, and one for {met}")
    keys = [f"met/{rank}" for rank in range(world.size)]
    me = json.dumps({"host": hostname(), "pid": os.getpid()})
    if (other := store.compare_set(keys[world.rank], "", me).decode()) != me:
        raise MeetingError(f"{world}: there are two of rank {world.rank}: {me} and {other}")
    try:
        store.wait(keys, patience)
    except dist.DistError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(f"rank {rank} on {world.host_of(rank)}" for rank in absent)
        raise MeetingError(f"{world}: {names} did not come within {patience.seconds} s") from None
    hosts = tuple(json.loads(said)["host"] for said in store.multi_get(keys))
    distinct = list(dict.fromkeys(hosts))
    if len(distinct) == 1:  # or nodes that this machine only plays
        return replace(world, hosts=hosts)
    return replace(world, hosts=hosts, node=distinct.index(hosts[world.rank]), nodes=len(distinct))

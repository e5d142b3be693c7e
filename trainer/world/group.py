"""How the ranks of one attempt meet, and what they do together from then on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config.errors import ConfigError
from trainer.say import say
from trainer.world.address import contact, use_interface
from trainer.world.world import MeetingError, World, hostname

# Nodes of one job start seconds apart, on a busy cluster a minute (a slow prolog, a cold file system): the ranks wait
# at least so long for each other, however short `launch.hang_timeout_s` is.
MEETING_S = 60.0
LATE_S = 30.0  # then a rank says whom it waits for
# What gloo, NCCL and the store say when a peer is no longer there.
OF_ABSENCE = re.compile("gloo|NCCL|Connection (closed|reset)|Broken pipe", re.IGNORECASE)
# How long the ranks wait for each other at the end, when all that matters is done.
FAREWELL_S = 10.0


class Absent(RuntimeError):
    """Another rank is no longer there."""


def is_of_absence(error: Exception) -> bool:
    """Whether an error says only that a peer is gone: then the peer's own error, if it had one, is what matters."""
    if isinstance(error, OSError):  # from Python's own pipe to a loader's process, say, which has died
        return False
    return isinstance(error, (Absent, dist.DistError)) or bool(OF_ABSENCE.search(str(error)))


class Group:
    """The ranks of one attempt, at the store that rank 0 serves at `address`; collectives need them to `connect` first.

    A world of one rank needs no process group and pays for none.
    """

    def __init__(
        self,
        world: World,
        store: dist.Store,
        device: torch.device,
        backend: str = "",
        address: str = "",
        published: Path | None = None,
    ) -> None:
        self.world = world
        self.store = store
        self.device = device
        self.backend = backend
        self.address = address
        self._published = published
        self._barriers = 0

    def connect(self, timeout_s: float) -> None:
        """Wait for the other ranks, for `timeout_s` each time, and set up collectives.

        A later collective may take twice as long: the watchdog, which can tell where each rank is stuck, comes first.
        Raises MeetingError when a rank does not come in time.
        """
        if self.world.size == 1:
            return
        # Before the collectives, where NCCL would wait in C and name nobody.
        cards = self._await_cards(patience(timeout_s))
        if self._published is not None:
            self._published.unlink(missing_ok=True)
        hosts = tuple(card["host"] for card in cards)
        nodes = list(dict.fromkeys(hosts))
        self.world = replace(self.world, hosts=hosts)
        if len(nodes) > 1:  # else it may be one that plays several
            node = nodes.index(hosts[self.world.rank])
            self.world = replace(self.world, node=node, nodes=len(nodes))
            elsewhere = next(card for card in cards if card["host"] != hosts[0])
            use_interface(cards[self.world.rank]["ours"] if node else elsewhere["theirs"])
        try:
            self._open(2 * patience(timeout_s))
        except RuntimeError as error:
            raise MeetingError(
                f"{self.world}: all are here, but {self.backend} cannot connect them ({_first_line(error)}); nodes "
                f"must let in each other's connections; {self.backend.upper()}_SOCKET_IFNAME chooses the network"
            ) from error

    def connect_alone(self) -> None:
        """Set up collectives in a world of one rank too, for code that asks torch for them."""
        if self.world.size == 1:
            self._open(patience(0.0))

    def _open(self, timeout: timedelta) -> None:
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("collectives", self.store),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=timeout,
            device_id=self.device if self.backend == "nccl" else None,
        )

    def _await_cards(self, patience: timedelta) -> list[dict[str, str]]:
        """What each rank said of itself when it signed in."""
        keys = [_card(rank) for rank in range(self.world.size)]
        aside = self.store.clone()  # a client serves one caller at a time

        def absent() -> str:
            ranks = [rank for rank, key in enumerate(keys) if not aside.check([key])]
            return ", ".join(f"rank {rank} on {self.world.host_of(rank)}" for rank in ranks)

        try:
            with _told_when_late(absent) if self.world.rank == 0 else contextlib.nullcontext():
                self.store.wait(keys, patience)
            return [json.loads(card) for card in self.store.multi_get(keys)]
        except dist.DistError as error:
            why = f"rank 0 on {self.world.host_of(0)} is gone: {_first_line(error)}"
        with contextlib.suppress(dist.DistError):
            if names := absent():
                why = f"{names} did not come within {patience.seconds} s"
        raise MeetingError(f"{self.world}: {why}")

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

    def broadcast_bool(self, answer: bool) -> bool:
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
        if dist.is_initialized():
            dist.destroy_process_group()


def sign_in(
    world: World, device: torch.device, backend: str, meeting: Path, timeout_s: float, init_method: str | None = None
) -> Group:
    """Reach the store at which the ranks meet, and leave this one's card there. Collectives will run over `backend`,
    nccl or gloo.

    As in `torch.distributed.init_process_group`, `init_method` says where rank 0 is found: `tcp://HOST:PORT`, `env://`
    (MASTER_ADDR and MASTER_PORT), or `file://PATH`, in which rank 0 publishes the free port that it took, and every
    address of its host. The default is env:// where those two are set, else the file `meeting`, of this attempt alone.

    Raises MeetingError when the store cannot be reached in time, ConfigError when its address cannot be right.
    """
    if world.size == 1:
        return Group(world, dist.HashStore(), device, backend)
    _allow_open_files()
    _shorten_lookups()
    purpose = f"{meeting.parent.parent.name}, attempt {meeting.stem}, {world.size} ranks"
    with _told_when_late(lambda: f"rank 0 on {world.host_of(0)}"):
        met = contact(world, purpose, meeting, init_method, patience(timeout_s))
    me = {"host": hostname(), "pid": str(os.getpid()), "ours": met.ours, "theirs": met.theirs}
    try:
        if world.rank == 0:
            met.store.set("purpose", purpose)
        if (other := met.store.get("purpose").decode()) != purpose:
            raise ConfigError(
                f"{world}: two jobs meet at {met.address}, this one ({purpose}) and another ({other}); give each its "
                "own port, or leave the address out"
            )
        card = json.dumps(me)
        if (first := met.store.compare_set(_card(world.rank), "", card).decode()) != card:
            places = " and ".join(f"process {one['pid']} on {one['host']}" for one in (json.loads(first), me))
            raise ConfigError(
                f"{world}: there are two of rank {world.rank}, {places}; give each process its own number"
            )
    except dist.DistError as error:
        raise MeetingError(f"{world}: rank 0 on {world.host_of(0)} is gone: {_first_line(error)}") from error
    return Group(world, met.store, device, backend, met.address, met.published)


@contextlib.contextmanager
def _told_when_late(who: Callable[[], str]) -> Iterator[None]:
    """Say whom this rank waits for, long before it gives up."""
    timer = threading.Timer(LATE_S, lambda: say(f"has waited {LATE_S:.0f} s for {who()}, and waits on"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _allow_open_files() -> None:
    """As many as the system does. Each rank costs rank 0 seven connections, and every other rank one of gloo's; the
    usual limit of a shell, 1,024, would be too low for 150 ranks."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _shorten_lookups() -> None:
    """Torch's store asks the name server, in its only thread, what each address that connects to it is called. A query
    that gets lost would hold up all ranks for 5 s, a name server that is down for half a minute (resolv.conf(5))."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1")


def patience(timeout_s: float) -> timedelta:
    """How long a rank waits for the others to come."""
    return timedelta(seconds=max(MEETING_S, timeout_s))


def _card(rank: int) -> str:
    return f"met/{rank}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]

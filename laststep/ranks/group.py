"""Group: the ranks of one attempt; how they meet, and the collectives that they run together."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from laststep import compat
from laststep.config.errors import first_line
from laststep.ranks import nccl_graph
from laststep.ranks.address import use_interface
from laststep.ranks.alarm import alarm
from laststep.ranks.device import SLICE
from laststep.ranks.node_checks import skewed_clocks
from laststep.ranks.seal import Seal
from laststep.ranks.sealed_store import SealedStore
from laststep.ranks.world import DeviceConflict, MeetingError, World
from laststep.say import say

# The nodes of one job start seconds apart, on a busy cluster up to a minute (a slow prolog, a cold file system). So the
# ranks wait at least this long for each other, however short `launch.hang_timeout_s` is.
MEETING_S = 60.0
SLOW_MEETING_S = 30.0  # after this a rank logs which ranks it is waiting for
# How long a collective may take. The watchdog, which knows where each rank is stuck, acts long before. torch measures
# by a clock: ranks that were suspended while they waited for each other would find that their collective timed out.
COLLECTIVE = timedelta(days=20)  # less than 32 bits of milliseconds
# How long the ranks wait for each other in `Group.close`, when all the work is done.
CLOSE_S = 10.0


class Registration(TypedDict):
    """What each rank writes to the store about itself."""

    host: str
    pid: str
    device: str  # cuda or cpu
    backend: str  # nccl or gloo
    gpu: str  # see `gpu_uuid`
    at: float  # Unix seconds by this host's clock
    local_ip: str  # see StoreConnection
    rank_0_ip: str


class Group:
    """The ranks of one attempt and the store that rank 0 serves at `address`. Call `connect` before any collective.

    A world of one rank creates no process group; its collectives return at once. Only torch itself uses the store
    without the attempt's `seal`. Rank 0 removes `meeting_files` once all ranks have met.
    """

    def __init__(
        self,
        world: World,
        store: dist.Store,
        device: torch.device,
        backend: str = "",
        address: str = "",
        seal: Seal | None = None,
        meeting_files: Sequence[Path] = (),
    ) -> None:
        self.world = world
        self.seal = seal or Seal()
        self.store = SealedStore(store, self.seal)
        self._unsealed_store = store
        self.device = device
        self.backend = backend
        self.address = address
        self._meeting_files = meeting_files
        self.skewed_clocks: list[str] = []  # on rank 0: one line for each host whose clock is wrong
        self.nccl_graph: str | None = None  # along which NCCL adds, see laststep.ranks.nccl_graph; None: not known
        self._barriers = 0

    def connect(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the other ranks, then set up collectives.

        Raises MeetingError when a rank does not join in time.
        """
        if self.world.size == 1:
            return
        # Before the collectives: NCCL would wait in C and name no rank.
        registered = self._wait_for_all_ranks(meeting_timeout(timeout_s))
        for file in self._meeting_files:
            with contextlib.suppress(OSError):  # it is of this attempt alone
                file.unlink(missing_ok=True)
        check_devices(registered)
        hosts = tuple(rank["host"] for rank in registered)
        if self.world.rank == 0:
            self.skewed_clocks = skewed_clocks(hosts, [rank["at"] for rank in registered], time.time())
        nodes = list(dict.fromkeys(hosts))
        self.world = replace(self.world, hosts=hosts)
        if len(nodes) > 1:  # with one host, keep the launcher's numbers: it may pretend to be several nodes
            node = nodes.index(hosts[self.world.rank])
            self.world = replace(self.world, node=node, nodes=len(nodes))
            elsewhere = next(rank for rank in registered if rank["host"] != hosts[0])
            use_interface(registered[self.world.rank]["local_ip"] if node else elsewhere["rank_0_ip"])
        try:
            if self.backend == "nccl":
                self._init_nccl(2 * meeting_timeout(timeout_s))
            else:
                self._init_process_group(2 * meeting_timeout(timeout_s))
        except RuntimeError as error:
            backend = self.backend
            raise MeetingError(
                f"{self.world}: all ranks joined, but {backend} cannot connect them ({first_line(error)}); nodes must "
                f"accept connections from each other; {backend.upper()}_SOCKET_IFNAME chooses the network"
            ) from error

    @property
    def host(self) -> str:
        """Rank 0's host, as this rank reaches it."""
        return self.address.rpartition(":")[0] or "127.0.0.1"

    def connect_alone(self) -> None:
        """Set up collectives in a world of one rank too, for code that uses torch.distributed directly."""
        if self.world.size == 1 and not dist.is_initialized():
            self._init_process_group(meeting_timeout(0.0))

    def _init_nccl(self, timeout: timedelta) -> None:
        """Set up collectives over NCCL, and learn along which graph it adds."""
        with nccl_graph.noted() as own_part:
            self._init_process_group(timeout)
            self.gather(torch.zeros(1, device=self.device))  # torch may have made the communicator in the background
            own = own_part()
        texts = self.gather(nccl_graph.to_tensor(own).to(self.device))
        try:
            self.nccl_graph = nccl_graph.combined([nccl_graph.from_tensor(text) for text in texts], self.world.nodes)
        except ValueError as error:
            if self.world.rank == 0:
                say(f"NCCL's graph is not recorded, so a resume over another one will not be noticed ({error})")

    def _init_process_group(self, timeout: timedelta) -> None:
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("collectives", self._unsealed_store),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=timeout,
            device_id=self.device if self.backend == "nccl" else None,
        )
        compat.set_timeout(COLLECTIVE)  # a short one is for the connections, which have no other limit

    def _wait_for_all_ranks(self, timeout: timedelta) -> list[Registration]:
        """What each rank registered, in rank order. Raises MeetingError, which names the ranks that are missing."""
        keys = [registration_key(rank) for rank in range(self.world.size)]
        second_client = self.store.clone()  # a client serves one caller at a time

        def missing() -> str:
            ranks = [rank for rank, key in enumerate(keys) if not second_client.check([key])]
            return ", ".join(f"rank {rank} on {self.world.host_of(rank)}" for rank in ranks)

        try:
            with log_if_slow(missing) if self.world.rank == 0 else contextlib.nullcontext():
                self.store.set_timeout(timeout)
                return [json.loads(registration) for registration in self.store.multi_get(keys)]
        except dist.DistError as error:
            why = f"rank 0 on {self.world.host_of(0)} is gone: {first_line(error)}"
        with contextlib.suppress(dist.DistError):
            if names := missing():
                why = f"{names} did not join within {timeout.seconds} s"
        raise MeetingError(f"{self.world}: {why}")

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The `tensor` of every rank, in rank order. A collective; the shapes must be equal."""
        if self.world.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world.size)]
        dist.all_gather(parts, tensor)
        return parts

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, on every rank, added in rank order. A collective.

        An all-reduce may add in an order that depends on an element's place in the buffer. Then the last bits of a
        metric would depend on how many steps were reduced together; here they do not.
        """
        return reduce(torch.add, self.gather(tensor))

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's values into the tensors of every rank, in place. A collective."""
        if self.world.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        """Start to copy the tensor of rank `source` to every rank, in place. Call what this returns before the tensor
        is read or changed. A collective, for a tensor on `collective_device`."""
        if self.world.size == 1:
            return lambda: None
        work = dist.broadcast(tensor, src=source, async_op=True)
        assert work is not None
        return work.wait

    @property
    def fails_with_peers(self) -> bool:
        """Whether a collective fails once one of its ranks is gone, as gloo's do. NCCL's wait for it forever."""
        return dist.is_initialized() and dist.get_backend() == "gloo"

    @property
    def collective_device(self) -> torch.device:
        """Where the tensors of a collective are: NCCL takes those of this rank's device only."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def broadcast_bool(self, value: bool) -> bool:
        """Rank 0's value, on every rank. A collective."""
        flag = torch.tensor(value, dtype=torch.uint8, device=self.device)
        self.broadcast([flag])
        return bool(flag)

    def broadcast_int(self, name: str, value: int | None) -> int | None:
        """Rank 0's value, on every rank. Runs over the store; use each `name` only once per attempt."""
        key = f"broadcast/{name}"
        if self.world.rank == 0:
            self.store.set(key, "" if value is None else str(value))
        text = self.store.get(key).decode()
        return int(text) if text else None

    def barrier(self, timeout_s: float) -> None:
        """Wait until every rank is here. Runs over the store, so it may last longer than a collective may.

        Raises torch.distributed.DistError after the timeout.
        """
        self._barriers += 1
        self._barrier(f"barrier/{self._barriers}", timedelta(seconds=timeout_s))

    def _barrier(self, name: str, timeout: timedelta) -> None:
        """Rank 0 waits for all ranks, the others for rank 0. A counter would do, but it cannot be sealed."""
        self.store.set(f"{name}/{self.world.rank}", "")
        if self.world.rank == 0:
            self.store.wait([f"{name}/{rank}" for rank in range(self.world.size)], timeout)
            self.store.set(f"{name}/open", "")
        else:
            self.store.wait([f"{name}/open"], timeout)

    def node_by_node(self, work: Callable[[], None]) -> None:
        """Call `work` on one rank of each node, one node after another: downloads never race, even on a shared disk."""
        for node in range(self.world.nodes):
            if self.world.node == node and self.world.local_rank == 0:
                work()
            self.barrier(timeout_s=24 * 3600)

    def close(self) -> None:
        """Disconnect once every rank has finished its last collective; wait only CLOSE_S, as a rank may be dead.

        A rank that disconnected earlier could cut off a peer that is still reading from it.
        """
        with contextlib.suppress(dist.DistError):
            self._barrier("closing", timedelta(seconds=CLOSE_S))
        if dist.is_initialized():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # the current device is the thread's, and this may be another one
            dist.destroy_process_group()


def check_devices(registered: Sequence[Registration]) -> None:
    """Raise DeviceConflict if some ranks have another device or backend than the others, or if two use one GPU, with
    which NCCL would fail. gloo lets ranks share a GPU, and runs on GPUs only if the configuration asks for it."""
    usual = next((one for one in registered if one["device"] != "cpu"), registered[0])
    odd = []
    for rank, one in enumerate(registered):
        if one["device"] != usual["device"]:
            odd.append(f"rank {rank} on {one['host']} found no GPU")
        elif one["backend"] != usual["backend"]:
            odd.append(f"rank {rank} on {one['host']} uses {one['backend']}")
    if odd:
        raise DeviceConflict(f"{', '.join(odd)}; the others train on {usual['device']} with {usual['backend']}")
    users: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(registered):
        first = users.setdefault((one["host"], one["gpu"]), rank)
        if first != rank and one["gpu"] and usual["backend"] != "gloo":
            is_slice = one["gpu"].startswith(SLICE)  # CUDA shows a process no other one
            fix = "launch.slurm.gpus-per-task=1 gives each rank its own" if is_slice else "use one rank per GPU"
            raise DeviceConflict(
                f"rank {first} and rank {rank} on {one['host']} both use {one['gpu']}; {fix}, or let them "
                "share it with launch.backend=gloo"
            )


def log_if_slow(missing: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Log which ranks this one is waiting for, long before it gives up."""
    return alarm(SLOW_MEETING_S, lambda: say(f"still waiting for {missing()} after {SLOW_MEETING_S:.0f} s"))


def meeting_timeout(timeout_s: float) -> timedelta:
    """How long a rank waits for the others to join."""
    return timedelta(seconds=max(MEETING_S, timeout_s))


def registration_key(rank: int) -> str:
    """The key under which a rank registers."""
    return f"met/{rank}"

"""Group: the ranks of one attempt; how they meet, and the collectives that they run together.

The tree sum over the ranks continues that over a rank's shares. Each rank has 2^k neighbouring shares, so its own sum
is a node of the tree. The result therefore depends neither on the number of ranks nor on the choices of gloo or NCCL,
which here move data but never add: an all-to-all brings the same chunk of all ranks to one of them, which adds these
pieces, and an all-gather brings the sums to all, as many bytes as a ring all-reduce sends. gloo's all-gather would
collect into new memory and copy from there, so with gloo each rank broadcasts its chunk instead.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laststep import compat
from laststep.compat import replace_default_timeouts, replace_group_functions
from laststep.config.config import Config
from laststep.config.errors import ConfigError, first_line
from laststep.ranks import nccl
from laststep.ranks.device import SLICE, choose_backend, gpu_uuid, set_up_device
from laststep.ranks.disk import Patience
from laststep.ranks.fault import DeviceConflict, MeetingError
from laststep.ranks.meeting import PUBLISH_S, SealedStore, StoreConnection, connect_to_store, use_interface
from laststep.ranks.process import Alarm
from laststep.ranks.seal import Seal
from laststep.ranks.world import ShardPlace, World, hostname
from laststep.say import say

# The nodes of one job start seconds apart, on a busy cluster up to a minute (a slow prolog, a cold file system). So the
# ranks wait at least this long for each other, however short `launch.hang_timeout_s` is.
MEETING_S = 60.0
SLOW_MEETING_S = 30.0  # after this a rank logs which ranks it is waiting for
# How long a collective may take. The watchdog, which knows where each rank is stuck, acts long before. torch measures
# by a clock: ranks that were suspended while they waited for each other would find that their collective timed out.
COLLECTIVE = timedelta(days=20)  # less than 32 bits of milliseconds
# How long the ranks wait for each other in `Group.close`, when all the work is done, and rank 0 then for the others to
# leave the store.
CLOSE_S, LEAVE_S = 10.0, 4.0
MOST_SKEW_S = 10.0  # between the clocks of two nodes


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
    """The ranks of one attempt and the store that rank 0 serves at `address`. Call `connect` before any collective. A
    world of one rank creates no process group; its collectives return at once. Only torch itself uses the store without
    the attempt's `seal`. Rank 0 removes `meeting_files` once all ranks have met."""

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
        self.nccl_graph: str | None = None  # along which NCCL adds, see laststep.ranks.nccl; None: not known
        self._barriers = 0

    def connect(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the other ranks, then set up collectives. Raises MeetingError when a rank does not
        join in time."""
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
        with nccl.noted() as own_part:
            self._init_process_group(timeout)
            self.gather(torch.zeros(1, device=self.device))  # torch may have made the communicator in the background
            own = own_part()
        texts = [text.decode() for text in self.gather_bytes(own.encode())]
        try:
            self.nccl_graph = nccl.combined(texts, self.world.nodes)
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
        keys = [f"met/{rank}" for rank in range(self.world.size)]
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

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in rank order. A collective; the lengths may differ."""
        if self.world.size == 1:
            return [data]
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        lengths = [int(each) for each in self.gather(torch.tensor(len(own), device=self.collective_device))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = self.gather(padded.to(self.collective_device))
        return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths)]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, on every rank, added in rank order. A collective. An all-reduce may add in an order
        that depends on an element's place in the buffer, and so on how many steps were reduced together."""
        return reduce(torch.add, self.gather(tensor))

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's values into the tensors of every rank, in place. A collective."""
        if self.world.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's data, on every rank. A collective; the lengths may differ."""
        if self.world.size == 1:
            return data
        length = torch.tensor(len(data), device=self.collective_device)
        self.broadcast([length])
        if not length:
            return b""
        given = bytearray(data) if self.world.rank == 0 else bytearray(int(length))
        text = torch.frombuffer(given, dtype=torch.uint8).to(self.collective_device)
        self.broadcast([text])
        return text.cpu().numpy().tobytes()

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
        """Wait until every rank is here. Runs over the store, so it may last longer than a collective may. Raises
        torch.distributed.DistError after the timeout."""
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
        """Disconnect once every rank has finished its last collective, or a peer that still reads would be cut off.
        Rank 0, which serves the store, leaves last. The waits are short, as a rank may be dead."""
        with contextlib.suppress(dist.DistError):
            self._barrier("closing", timedelta(seconds=CLOSE_S))
            self.store.set(f"left/{self.world.rank}", "")  # a rank's last access; torch waits for no answer to it
            if self.world.rank == 0:
                names = [f"left/{rank}" for rank in range(self.world.size)]
                self.store.wait(names, timedelta(seconds=LEAVE_S))
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


def log_if_slow(missing: Callable[[], str]) -> contextlib.AbstractContextManager[object]:
    """Log which ranks this one is waiting for, long before it gives up."""
    return Alarm(SLOW_MEETING_S, lambda: say(f"still waiting for {missing()} after {SLOW_MEETING_S:.0f} s"))


def meeting_timeout(timeout_s: float) -> timedelta:
    """How long a rank waits for the others to join."""
    return timedelta(seconds=max(MEETING_S, timeout_s))


def join(
    config: Config,
    world: World,
    address_file: Path,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Group:
    """The group that this rank now belongs to; call `Group.connect` next. Raises as `register_rank` does."""
    device = set_up_device(config, world)
    return register_rank(
        world, device, choose_backend(config, device), address_file, timeout_s, config.launch.init_method, check
    )


def register_rank(
    world: World,
    device: torch.device,
    backend: str,
    address_file: Path,
    timeout_s: float,
    init_method: str | None = None,
    check: Callable[[], None] = lambda: None,
) -> Group:
    """Connect to the store at which the ranks meet, and register this rank there. Does not wait for the other ranks:
    `Group.connect` does. Collectives will run over `backend`, nccl or gloo.

    As in `torch.distributed.init_process_group`, `init_method` says where rank 0 is found: `tcp://HOST:PORT`, `env://`
    (MASTER_ADDR and MASTER_PORT), or `file://PATH`, a file in which rank 0 publishes its port and every address of its
    host. The default is env:// where both variables are set, else file:// with `address_file`, which belongs to this
    attempt alone and lies on a disk that all ranks share. While this rank waits for rank 0 it calls `check`, which may
    raise MeetingError.

    Raises MeetingError when the store cannot be reached in time, ConfigError when its address cannot be right, or when
    another job or another process with the same rank is there.
    """
    if world.size == 1:
        return Group(world, dist.HashStore(), device, backend)
    _allow_many_connections()
    # Rank 0 leaves the secret of the attempt's seal there until all ranks have read it.
    seal, secret = Seal(), address_file.with_suffix(".key")
    timeout = meeting_timeout(timeout_s)
    if world.rank == 0:
        Patience(PUBLISH_S, say).insist(lambda: seal.save(secret))
    purpose = f"{address_file.parent.parent.name}, attempt {address_file.stem}, {world.size} ranks"
    with log_if_slow(lambda: f"rank 0 on {world.host_of(0)}"):
        met = connect_to_store(world, purpose, address_file, init_method, timeout, check)
    try:
        if world.rank == 0:
            met.store.set("purpose", purpose)
            met.store.set("seal", seal.fingerprint)
        if (other := met.store.get("purpose").decode()) != purpose:
            raise ConfigError(
                f"{world}: two jobs use {met.address}: this one ({purpose}) and another ({other}); give each its own "
                "port, or none"
            )
        if world.rank:
            seal = _load_seal(world, secret, met.store.get("seal").decode(), timeout)
        _register(world, device, backend, met, seal)
    except dist.DistError as error:
        raise MeetingError(f"{world}: rank 0 on {world.host_of(0)} is gone: {first_line(error)}") from error
    files = [file for file in (secret, met.address_file) if file is not None and world.rank == 0]
    return Group(world, met.store, device, backend, met.address, seal, files)


def _allow_many_connections() -> None:
    """Each rank costs rank 0 seven connections, and every other rank one of gloo's. A shell's usual limit of 1,024
    files would be too low for 150 ranks. Torch's store looks up the name of each address that connects to it, in its
    only thread: a lost query would delay all ranks by 5 s, a name server that is down by half a minute
    (resolv.conf(5))."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    os.environ.setdefault("RES_OPTIONS", "timeout:1")


def _register(world: World, device: torch.device, backend: str, met: StoreConnection, seal: Seal) -> None:
    """Write what the other ranks must know of this one. Raises ConfigError when there is another with its number."""
    me = Registration(
        host=hostname(),
        pid=str(os.getpid()),
        device=device.type,
        backend=backend,
        gpu=gpu_uuid(device),
        at=time.time(),
        local_ip=met.local_ip,
        rank_0_ip=met.rank_0_ip,
    )
    mine, store = json.dumps(me), SealedStore(met.store, seal)
    if (first := store.compare_set(f"met/{world.rank}", "", mine).decode()) != mine:
        places = " and ".join(f"process {one['pid']} on {one['host']}" for one in (json.loads(first), me))
        raise ConfigError(f"{world}: two processes claim rank {world.rank}: {places}; give each process its own rank")


def _load_seal(world: World, file: Path, fingerprint: str, timeout: timedelta) -> Seal:
    """The seal that rank 0 has made. Raises MeetingError when this host does not see it in time."""
    try:
        seal = Seal.load(file, fingerprint, timeout, world.size)
        why = "does this host see its disk, or was this rank started twice?"
    except OSError as error:
        seal, why = None, str(error.strerror)
    if seal is None:
        raise MeetingError(
            f"{world}: rank 0 on {world.host_of(0)} left this attempt's secret in {file}, which {hostname()} did not "
            f"find within {timeout.seconds} s: {why}"
        )
    return seal


def tree_sum(rows: Tensor) -> Tensor:
    """The sum over the first dimension, in a fixed order; overwrites `rows`. Neighbours are added pairwise as long as
    the number of rows is even, then the odd number that is left from left to right. So 12 rows are 6 sums, then 3, and
    these are added one after another."""
    while len(rows) % 2 == 0:
        rows = rows[0::2].add_(rows[1::2])
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    return total


class BucketSum:
    """The sum of one of DDP's buckets over the ranks of a group, in the bucket's own memory."""

    def __init__(
        self, buffer: Tensor, size: int, received: Tensor | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Start the first half: each of the `size` ranks gets one chunk. `received` is memory to use, of the buffer's
        length rounded up to a multiple of `size`."""
        self._buffer, self._size, self._group = buffer, size, group
        missing = -len(buffer) % size
        self._whole = torch.nn.functional.pad(buffer, (0, missing)) if missing else buffer
        self._received = torch.empty_like(self._whole) if received is None else received
        self._scattering = dist.all_to_all_single(self._received, self._whole, group=group, async_op=True)
        self._gathering: list[dist.Work] = []

    def gather(self) -> None:
        """The second half: start to collect the chunks."""
        if self._gathering:
            return
        self._scattering.wait()  # with NCCL only the current stream waits
        chunk, group = tree_sum(self._received.view(self._size, -1)), self._group
        if self._whole.is_cuda:
            self._gathering = [compat.all_gather_single(self._whole, chunk, group=group, async_op=True)]
            return
        chunks = self._whole.chunk(dist.get_world_size(group))
        chunks[dist.get_rank(group)].copy_(chunk)
        self._gathering = [
            dist.broadcast(one, group=group, group_src=rank, async_op=True) for rank, one in enumerate(chunks)
        ]

    def wait(self) -> Tensor:
        """The bucket with the sum in it."""
        assert self._gathering
        for work in self._gathering:
            work.wait()
        if self._whole is not self._buffer:
            self._buffer.copy_(self._whole[: len(self._buffer)])
        return self._buffer


class TreeHook:
    """DDP's communication hook: gives each bucket its sum over the ranks, not the mean.

    DDP calls it for one bucket after another, in the same order on every rank, while the backward pass is under way. On
    a GPU everything is queued on a stream beside it. On a CPU somebody has to wait between the two halves: the second
    half of a bucket begins when the next bucket is ready.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: list[tuple[BucketSum, Future[Tensor]]] = []
        self.sums = 0  # how often all buckets have been summed
        self._received: dict[int, Tensor] = {}  # by bucket, on a CPU: new memory costs as much time as the sum

    def register(self, ddp: DistributedDataParallel) -> None:
        """Have DDP call this from now on."""
        ddp.register_comm_hook(None, lambda _, bucket: self._bucket_ready(bucket))  # DDP rejects annotations as text

    def _bucket_ready(self, bucket: dist.GradBucket) -> Future[Tensor]:
        self.sums += bucket.is_last()
        if self._stream is not None:
            return self._queue(bucket.buffer(), self._stream)
        started, future = BucketSum(bucket.buffer(), self._size, self._memory_for(bucket)), Future[Tensor]()
        for earlier, _ in self._under_way:
            earlier.gather()
        self._under_way.append((started, future))
        if bucket.is_last():
            started.gather()
            under_way, self._under_way = self._under_way, []
            for each, its_future in under_way:
                its_future.set_result(each.wait())
        return future

    def _memory_for(self, bucket: dist.GradBucket) -> Tensor:
        buffer, known = bucket.buffer(), self._received.get(bucket.index())
        length = -(-len(buffer) // self._size) * self._size
        if known is None or len(known) != length or known.dtype != buffer.dtype:  # DDP changes its buckets once
            known = self._received[bucket.index()] = buffer.new_empty(length)
        return known

    def _queue(self, buffer: Tensor, stream: torch.cuda.Stream) -> Future[Tensor]:
        """Queue both halves on a GPU. DDP's wait for the result is a wait of its stream for this one."""
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            started, future = BucketSum(buffer, self._size), Future[Tensor](devices=[buffer.device])
            started.gather()
            future.set_result(started.wait())
        return future


def make_mesh(place: ShardPlace, device: torch.device, adds_replicas: bool = True) -> DeviceMesh:
    """The mesh of all ranks. One replica: of the dimension "shard". Several: of "replicate" and "shard"; unless FSDP2
    `adds_replicas`, the mesh of this rank's replica alone. A collective."""
    names = ("replicate", "shard")
    if place.replicas == 1:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=names[1:])
    shards = _group(place.ranks)
    if not adds_replicas:
        return DeviceMesh.from_group(shards, device.type, mesh_dim_names=names[1:])
    groups = [replica_group(place), shards]
    return DeviceMesh.from_group(groups, device.type, mesh=place.ranks, mesh_dim_names=names)


def replica_group(place: ShardPlace) -> dist.ProcessGroup:
    """The ranks that hold this rank's shard. A collective."""
    return _group(list(zip(*place.ranks)))


def _group(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """That of these groups of ranks which this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration([list(part) for part in parts], timeout=COLLECTIVE)
    return group


def lend_group(group: Group) -> Callable[[], None]:
    """From now on `init_process_group` joins the process group that exists, `destroy_process_group` leaves the default
    one alone, and other groups have its timeouts. Call what this returns to undo that. A module that has imported the
    two functions before by their names keeps torch's own."""
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def join(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            _check(group, inspect.signature(init).bind(*args, **kwargs).arguments)
        else:
            init(*args, **kwargs)

    def leave(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    undo = contextlib.ExitStack()
    undo.callback(replace_default_timeouts(COLLECTIVE))
    undo.callback(replace_group_functions(join, leave))
    return undo.close


def _check(group: Group, given: dict[str, Any]) -> None:
    """Raise ConfigError if the script asks for other ranks, and warn if it asks for another backend."""
    world = group.world
    for name, ours in (("rank", world.rank), ("world_size", world.size)):
        if given.get(name, -1) not in (-1, ours):
            raise ConfigError(
                f"init_process_group({name}={given[name]}): this is rank {world.rank} of {world.size}; leave {name} out"
            )
    wanted = str(given.get("backend") or group.backend).lower()
    by_device = dict(part.split(":", 1) for part in wanted.split(",") if ":" in part)
    needed = {by_device.get(device, group.backend) for device in ("cpu", group.device.type)} if by_device else {wanted}
    if needed != {group.backend} and world.rank == 0:
        say(
            f"WARNING: init_process_group(backend={wanted}): the ranks are connected by {group.backend} already; "
            "launch.backend chooses the backend"
        )


# gloo has no type of its own: its errors are RuntimeErrors that begin with the place in its source that lost the peer.
# Its checks of arguments begin with "[enforce fail at" instead.
GLOO_PEER_LOSS = re.compile(r"\[\S*gloo/transport/\S+:\d+\] |Application timeout caused pair closure")
# NCCL reports with one type that a peer is gone, and what is wrong with this rank's own GPU or call.
NCCL_OWN_ERROR = re.compile("^nccl(UnhandledCudaError|InvalidArgument|InvalidUsage):", re.MULTILINE)


class PeerLost(RuntimeError):
    """Another rank is gone."""


def is_peer_loss(error: Exception) -> bool:
    """Whether an error says only that a peer is gone. Then the peer's own error, if it had one, is what matters."""
    if isinstance(error, dist.DistBackendError):
        return not NCCL_OWN_ERROR.search(str(error))
    if isinstance(error, (PeerLost, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(GLOO_PEER_LOSS.match(str(error)))


def skewed_clocks(hosts: Sequence[str], registered_at: Sequence[float], now: float) -> list[str]:
    """One line for each host whose clock differs too much from that of rank 0's host: all ranks have registered
    between rank 0, which was the first, and `now`, when it has read them all."""
    lines = {}
    for host, at in zip(hosts, registered_at):
        skew_s = min(0.0, at - registered_at[0]) + max(0.0, at - now)
        if abs(skew_s) > MOST_SKEW_S and host != hosts[0]:
            way = "ahead of" if skew_s > 0 else "behind"
            lines[host] = f"{host}: its clock is {abs(skew_s):.0f} s {way} that of {hosts[0]}"
    return list(lines.values())

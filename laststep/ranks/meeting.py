"""The key-value store of an attempt, over which its ranks meet: how they find it, and the seal on all that it holds.

Rank 0 serves torch's TCPStore and publishes its address; the others read the address and connect (`connect_to_store`).
From then on every value carries the attempt's seal (`SealedStore`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from laststep.config.errors import ConfigError
from laststep.ranks.disk import FreshView, Patience
from laststep.ranks.fault import MeetingError
from laststep.ranks.launchers import address_towards
from laststep.ranks.process import run_time, start_thread
from laststep.ranks.seal import Seal
from laststep.ranks.world import World, hostname
from laststep.rundir import write_whole
from laststep.say import say

UNSEALED_POLL_S = 0.1  # between two looks at a key that holds a value without the seal
SLACK_S = 0.5  # by which a timeout may come early


class SealedStore:
    """A connection to the store in which every value carries the seal; a value without it counts as absent. Its methods
    are those of torch's Store, without `add`: a counter cannot carry a seal. A timeout counts only the time in which
    this process could run. torch measures it by a clock, so what timed out early is waited for again."""

    def __init__(self, store: dist.Store, seal: Seal, prefix: str = "") -> None:
        self._store, self._seal, self._prefix = store, seal, prefix

    def clone(self) -> SealedStore:
        """A connection for another thread, since each serves one caller at a time."""
        return SealedStore(self._store.clone(), self._seal, self._prefix)

    def with_prefix(self, prefix: str) -> SealedStore:
        """The same connection, with `prefix` before every key."""
        return SealedStore(self._store, self._seal, f"{self._prefix}{prefix}/")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `multi_get` wait."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        key = self._prefix + key
        self._store.set(key, self._seal.seal(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises torch.distributed.DistError when there is none in time."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys. Raises torch.distributed.DistError when one is missing in time."""
        return self._wait(keys, self._store.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys have values. Raises torch.distributed.DistError when one is missing in time."""
        deadline, names = run_time() + timeout.total_seconds(), [self._prefix + key for key in keys]
        while True:
            try:
                self._store.wait(names, timedelta(seconds=max(0.0, deadline - run_time())))
                break
            except dist.DistStoreError:
                if run_time() > deadline - SLACK_S:
                    raise
        self._wait(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return self._store.check([self._prefix + key for key in keys]) and None not in self._read(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Store a value unless there is one; returns the value that is there now. `expected_value` must be empty."""
        assert not expected_value, "only the first value counts"
        key = self._prefix + key
        expected, desired = b"", self._seal.seal(key, desired_value)
        while (text := self._seal.open(key, found := self._store.compare_set(key, expected, desired))) is None:
            # It has no seal: replace it. The store returns what was expected where there is nothing (any more).
            expected = b"" if found == expected else found
        return text.encode()

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._store.delete_key(self._prefix + key))

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        deadline = run_time() + timeout.total_seconds()
        while True:
            try:
                texts = self._read(keys)
            except dist.DistStoreError:
                if run_time() > deadline - SLACK_S:
                    raise
                continue
            values = [text.encode() for text in texts if text is not None]
            if len(values) == len(keys):
                return values
            if run_time() > deadline:
                missing = ", ".join(key for key, text in zip(keys, texts) if text is None)
                raise dist.DistStoreError(f"no signed message within {timeout.total_seconds():g} s, keys: {missing}")
            time.sleep(UNSEALED_POLL_S)

    def _read(self, keys: Sequence[str]) -> list[str | None]:
        """The texts of all keys, as soon as each has a value; None for a value without the seal."""
        keys = [self._prefix + key for key in keys]
        return [self._seal.open(key, value) for key, value in zip(keys, self._store.multi_get(keys))]


def with_prefix(prefix: str, store: dist.Store) -> dist.Store:
    """The store, sealed or not, with `prefix` before every key."""
    return store.with_prefix(prefix) if isinstance(store, SealedStore) else dist.PrefixStore(prefix, store)


POLL_S = 0.05
# How long rank 0 tries to leave its address and its secret on a disk that refuses. The others wait for a minute.
PUBLISH_S = 20.0
CONNECT_S = 3.0  # a firewall that drops packets gives no answer at all
ANSWER_S = 10.0
SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of a network interface
MASTER = ("MASTER_ADDR", "MASTER_PORT")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class StoreConnection(NamedTuple):
    """This rank's connection to the store that rank 0 serves."""

    store: dist.Store
    address: str  # HOST:PORT
    local_ip: str = ""  # the IP address this rank connected from; "" on rank 0, which serves
    rank_0_ip: str = ""  # the IP address of rank 0's host that it connected to; "" on rank 0
    address_file: Path | None = None  # where rank 0 published the address; None on other ranks


class _NoAddressYet(Exception):
    """Rank 0 has not published its address yet."""


def connect_to_store(
    world: World,
    purpose: str,
    address_file: Path,
    init_method: str | None,
    timeout: timedelta,
    check: Callable[[], None] = lambda: None,
) -> StoreConnection:
    """Serve the store on rank 0, connect to it on every other rank; `laststep.ranks.group.register_rank` has the rules.

    `purpose` names the run, attempt and size, so that an address left by another attempt is not mistaken for ours.
    `check` is called between two tries: what it raises ends them.

    Raises MeetingError when the store cannot be reached in time, ConfigError when its address cannot be right.
    """
    has_master = all(os.environ.get(name) for name in MASTER)
    method = init_method or ("env://" if has_master else f"file://{address_file}")
    scheme, _, place = method.partition("://")
    if scheme == "file":
        file = Path(place)
        source = f"launch.init_method={method}" if init_method else str(file)
        try:
            if world.rank == 0:
                return _serve_and_publish(world, purpose, file, timeout)
            view = FreshView(world.size, file.parent)

            def find_address() -> tuple[Sequence[str], int]:
                view.refresh()
                return _read_address(file, purpose)

            return _connect(world, find_address, timeout, source, check)
        except OSError as error:
            if not init_method:
                raise
            raise ConfigError(f"{source}: {error.strerror} on {hostname()}") from None
    if scheme == "env":
        host, port, source = _master_from_environment()
    else:
        host, _, digits = place.rpartition(":")
        host, port, source = host.strip("[]"), int(digits), f"launch.init_method={method}"
    if scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agents have already met at a store that torchrun serves itself. It outlives torchrun's restarts,
        # so each attempt needs its own prefix.
        connection = _connect(world, lambda: ([host], port), timeout, source, check)
        return connection._replace(store=dist.PrefixStore(f"laststep/{world.attempt}", connection.store))
    _check_host(world, host, source)
    if world.rank == 0:
        return StoreConnection(_serve(world, named_address(world, host), port, timeout, source), f"{host}:{port}")
    return _connect(world, lambda: ([host], port), timeout, source, check)


def use_interface(address: str) -> None:
    """Make gloo use the network interface with this address, unless GLOO_SOCKET_IFNAME already names one. Its own
    choice is the address that the node's name resolves to, on Debian often 127.0.1.1."""
    for name, its_address in interfaces():
        if its_address == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interfaces() -> list[tuple[str, str]]:
    """Name and address of each network interface (Linux) that other machines can reach, IPv4 first, then IPv6."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):  # no IPv6 on this machine
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # global scope
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return [(name, address) for name, address in found if not address.startswith("127.")]


def _master_from_environment() -> tuple[str, int, str]:
    """Host, port and their source, from MASTER_ADDR and MASTER_PORT. Raises ConfigError."""
    for name in MASTER:
        if not os.environ.get(name):
            raise ConfigError(
                f"launch.init_method=env://: {name} is not set on {hostname()}; set it, or remove launch.init_method"
            )
    host, port = (os.environ[name] for name in MASTER)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT={port}: must be a number from 1 to 65535")
    return host, int(port), f"MASTER_ADDR={host} MASTER_PORT={port}"


def _check_host(world: World, host: str, source: str) -> None:
    """Raise ConfigError when `host` cannot name rank 0's host. Every rank checks, so none waits for the others."""
    if world.nodes > 1 and host in LOOPBACK:
        raise ConfigError(
            f"{source}: on each of the {world.nodes} nodes, {host} is the node itself; give the address of rank 0's "
            "host, or remove this setting"
        )
    try:
        socket.getaddrinfo(host, None)
    except (UnicodeError, socket.gaierror) as error:
        # A name server may recover from other errors. And outside a cluster (Kubernetes) rank 0's host may get its name
        # only after this rank starts.
        is_unknown = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME and world.launcher != "env"
        if is_unknown or isinstance(error, UnicodeError):
            raise ConfigError(f"{source}: {_unresolved(host)}") from None


def _unresolved(host: str) -> str:
    return f"{host} does not resolve on {hostname()}; give an IP address, or remove this setting"


def _serve_and_publish(world: World, purpose: str, file: Path, timeout: timedelta) -> StoreConnection:
    """Rank 0: serve the store at any free port, and write its address into `file`."""
    address = _meeting_address(world)
    store = _serve(world, address, 0, timeout, str(file))
    hosts = [address] if address else [hostname(), *(address for _, address in interfaces())]
    text = json.dumps({"purpose": purpose, "places": hosts, "port": store.port})

    def publish() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)

    Patience(PUBLISH_S, say).insist(publish)
    return StoreConnection(store, f"{hosts[0]}:{store.port}", address_file=file)


def _read_address(file: Path, purpose: str) -> tuple[Sequence[str], int]:
    """Any other rank: the hosts to try, best first, and the port. Raises _NoAddressYet."""
    try:
        published = json.loads(file.read_text())
        if published["purpose"] != purpose:  # left by an earlier attempt, or written by another job
            raise _NoAddressYet(f"the file there is for {published['purpose']}")
        hosts, port = published["places"], published["port"]
    except FileNotFoundError:
        raise _NoAddressYet("was it started, and does this host see its disk?") from None
    except (IsADirectoryError, NotADirectoryError):
        raise
    except OSError as error:  # which may pass
        raise _NoAddressYet(f"{error.strerror} on {hostname()}") from None
    except (ValueError, KeyError, TypeError):
        raise _NoAddressYet("the file there is not an address file") from None
    # An address that this host has too (a container bridge, the same on every host) would lead back to this host.
    local = {address for _, address in interfaces()}
    return sorted(hosts, key=lambda host: host in local), port


def _meeting_address(world: World) -> str:
    """The one address of this host, rank 0's, at which the other ranks reach it; empty if that is not certain."""
    if _on_one_host(world):
        return "127.0.0.1"
    addresses = [address for _, address in interfaces()]
    others = [host for host in world.hosts if host not in ("", world.hosts[0])][:1]
    # Where names do not resolve: srun's address. It is this host's own, or that of another host of the cluster.
    for host in (*others, os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")):
        if host and (address := address_towards(host)) in addresses:
            return address
    return addresses[0] if len(addresses) == 1 else ""


def _on_one_host(world: World) -> bool:
    """Whether all ranks are certainly on this host: torch's own variables need not say how many nodes there are."""
    return world.nodes == 1 and (world.launcher != "env" or "LOCAL_WORLD_SIZE" in os.environ)


def named_address(world: World, host: str) -> str:
    """The one address of this host that `host`, the user's name for it, stands for; empty if that is not certain. On
    Debian a host's own name resolves to 127.0.1.1 there, and to another address elsewhere."""
    with contextlib.suppress(OSError):
        found = {str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        usable = found if _on_one_host(world) else found & {address for _, address in interfaces()}
        if host in LOOPBACK or len(found) == 1 == len(usable):
            return min(found)
    return ""


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at this port (0: any free one) of this address (empty: of every one). Raises OSError."""
    dual_stack = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=2048, dualstack_ipv6=dual_stack)


def _serve(world: World, address: str, port: int, timeout: timedelta, source: str) -> dist.TCPStore:
    """Rank 0: serve the store, which takes over the bound socket, so that no other process can take the port."""
    try:
        listener = listen(address, port)
    except OSError as error:
        raise ConfigError(
            f"{source}: port {port} on {hostname()}: {error.strerror}; choose another port, or remove this setting: "
            "rank 0 then takes a free one"
        ) from None
    port = listener.getsockname()[1]
    host, descriptor = address or "localhost", listener.detach()
    return dist.TCPStore(host, port, world.size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def _connect(
    world: World,
    find_address: Callable[[], tuple[Sequence[str], int]],
    timeout: timedelta,
    source: str,
    check: Callable[[], None],
) -> StoreConnection:
    """Connect to the first host that answers, and keep trying until the timeout. There may be several: names do not
    resolve everywhere, and not every network reaches every node."""
    deadline = run_time() + timeout.total_seconds()
    problem = detail = ""
    while run_time() < deadline:
        failures: dict[str, OSError] = {}  # by host
        try:
            hosts, port = find_address()
            for host in hosts:
                try:
                    return _connect_once(world, host, port, timeout)
                except OSError as error:
                    failures[host] = error
            tried = ", ".join(f"{host}:{port}: {e.strerror or e}" for host, e in failures.items())
            problem, detail = "cannot be reached", f"{tried} (from {source})"
        except _NoAddressYet as reason:
            problem, detail = f"did not publish its address in {source}", str(reason)
        check()
        time.sleep(POLL_S)
    for host, failure in failures.items():
        if isinstance(failure, socket.gaierror) and len(failures) == 1:
            raise ConfigError(f"{source}: {_unresolved(host)}")
    raise MeetingError(f"{world}: rank 0 on {world.host_of(0)} {problem} within {timeout.seconds} s: {detail}")


def _connect_once(world: World, host: str, port: int, timeout: timedelta) -> StoreConnection:
    """Connect to one host. Raises OSError."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
        local_ip, rank_0_ip = probe.getsockname()[0], probe.getpeername()[0]
    results: queue.SimpleQueue[dist.Store | dist.DistError] = queue.SimpleQueue()

    def create_client() -> None:
        try:
            results.put(dist.TCPStore(host, port, world.size, False, timeout, wait_for_workers=False))
        except dist.DistError as error:
            results.put(error)

    # In a thread: if something else than a store listens there, torch waits for its answer without a timeout.
    start_thread("client", create_client)
    with contextlib.suppress(queue.Empty):
        result = results.get(timeout=min(ANSWER_S, timeout.total_seconds()))
        if not isinstance(result, dist.DistError):
            return StoreConnection(result, f"{host}:{port}", local_ip, rank_0_ip)
    raise OSError("something else listens there")

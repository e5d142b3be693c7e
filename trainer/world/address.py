"""Where rank 0 serves the store at which all ranks meet, how the others find it, and over which network."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from trainer.config.errors import ConfigError
from trainer.world.world import MeetingError, World, hostname

POLL_S = 0.05
CONNECT_S = 3.0  # a firewall that drops what comes says nothing at all
ANSWER_S = 10.0
SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of a network interface
MASTER = ("MASTER_ADDR", "MASTER_PORT")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Contact(NamedTuple):
    """The store that rank 0 serves, as this rank has reached it."""

    store: dist.Store
    address: str
    ours: str = ""  # the IP address that this rank has connected from, "" for rank 0, which serves
    theirs: str = ""  # and the one of rank 0's host that it has connected to
    published: Path | None = None  # where rank 0 has written the address down


class _NotYet(Exception):
    """Rank 0 has not said where it is."""


def contact(world: World, purpose: str, meeting: Path, init_method: str | None, patience: timedelta) -> Contact:
    """Serve the store, or reach it; see `trainer.world.group.sign_in`. `purpose` tells this meeting from any other.

    Raises MeetingError when it cannot be reached in time, ConfigError when its address cannot be right.
    """
    by_hand = all(os.environ.get(name) for name in MASTER)
    method = init_method or ("env://" if by_hand else f"file://{meeting}")
    scheme, _, place = method.partition("://")
    if scheme == "file":
        file = Path(place)
        source = f"launch.init_method={method}" if init_method else str(file)
        try:
            if world.rank == 0:
                return _publish(world, purpose, file, patience)
            return _reach(world, lambda: _published(file, purpose), patience, source)
        except OSError as error:
            if not init_method:
                raise
            raise ConfigError(f"{source}: {error.strerror} on {hostname()}") from None
    if scheme == "env":
        host, port, source = _from_environment()
    else:
        host, _, digits = place.rpartition(":")
        host, port, source = host.strip("[]"), int(digits), f"launch.init_method={method}"
    if scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun serves a store itself, which outlives its restarts; its agents have met there.
        met = _reach(world, lambda: ([host], port), patience, source)
        return met._replace(store=dist.PrefixStore(f"laststep/{world.attempt}", met.store))
    _check_host(world, host, source)
    if world.rank == 0:
        return Contact(_serve(world, port, patience, source), f"{host}:{port}")
    return _reach(world, lambda: ([host], port), patience, source)


def use_interface(address: str) -> None:
    """Have gloo use the network interface that has this address, unless GLOO_SOCKET_IFNAME names one.

    By itself it takes the address that the node's own name resolves to: on Debian often 127.0.1.1, which no other node
    can reach, and where names do not resolve the loopback.
    """
    for name, its in interfaces():
        if its == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interfaces() -> list[tuple[str, str]]:
    """Name and address of each network interface of this machine (Linux): the IPv4 ones, then the IPv6 ones; those that
    reach no other machine are left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):  # no IPv6 here
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # global, not of this link or host alone
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return [(name, address) for name, address in found if not address.startswith("127.")]


def _from_environment() -> tuple[str, int, str]:
    for name in MASTER:
        if not os.environ.get(name):
            raise ConfigError(
                f"launch.init_method=env://: {name} is not set on {hostname()}; set it, or leave this out"
            )
    host, port = (os.environ[name] for name in MASTER)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT={port}: must be a number from 1 to 65535")
    return host, int(port), f"MASTER_ADDR={host} MASTER_PORT={port}"


def _check_host(world: World, host: str, source: str) -> None:
    """Raise ConfigError on every rank, so that none waits for the others, when the name of rank 0's host is wrong."""
    if world.nodes > 1 and host in LOOPBACK:
        raise ConfigError(
            f"{source}: each of the {world.nodes} nodes would meet itself there; give the address of rank 0's host, or "
            "leave it out"
        )
    try:
        socket.getaddrinfo(host, None)
    except UnicodeError:  # it cannot be a name
        raise ConfigError(f"{source}: {_unresolved(host)}") from None
    except socket.gaierror as error:
        # A name server that is away may come back. And elsewhere than on a cluster (Kubernetes) a name may come with
        # its host, after this one.
        if error.errno == socket.EAI_NONAME and world.launcher != "env":
            raise ConfigError(f"{source}: {_unresolved(host)}") from None


def _unresolved(host: str) -> str:
    return f"{host} does not resolve on {hostname()}; give an IP address, or leave it out"


def _publish(world: World, purpose: str, file: Path, patience: timedelta) -> Contact:
    """Rank 0: serve at any free port, and write down where."""
    store = _serve(world, 0, patience, str(file))
    places = [hostname(), *(address for _, address in interfaces())]
    if world.nodes == 1:
        # No name needs to resolve, and none is waited for: a laptop's or a container's own often does not.
        places.insert(0, "localhost")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"purpose": purpose, "places": places, "port": store.port}))
    temporary.replace(file)
    return Contact(store, f"{places[0]}:{store.port}", published=file)


def _published(file: Path, purpose: str) -> tuple[Sequence[str], int]:
    """Any other rank: where rank 0 serves. Raises _NotYet."""
    try:
        said = json.loads(file.read_text())
        if said["purpose"] != purpose:  # a meeting's before this one, or another job's
            raise _NotYet(f"there is that of {said['purpose']}")
        places, port = said["places"], said["port"]
    except FileNotFoundError:
        raise _NotYet("was it started, and does this host see its disk?") from None
    except (ValueError, KeyError, TypeError):
        raise _NotYet("something else is there") from None
    # What is an address of this host too (a container bridge's, alike on every host) leads to itself.
    own = {address for _, address in interfaces()}
    return sorted(places, key=lambda place: place in own), port


def _serve(world: World, port: int, patience: timedelta, source: str) -> dist.TCPStore:
    """Rank 0: bind the port, 0 for any free one. The bound socket goes to the store: nobody can take it in between."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"{source}: port {port} on {hostname()}: {error.strerror}; choose another, or leave it out: then rank 0 "
            "takes a free one"
        ) from None
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "localhost", port, world.size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _reach(world: World, find: Callable[[], tuple[Sequence[str], int]], patience: timedelta, source: str) -> Contact:
    """Connect to the first host that answers: names do not resolve everywhere, nor is every network shared."""
    deadline = time.monotonic() + patience.total_seconds()
    what = why = ""
    while time.monotonic() < deadline:
        failures: dict[str, OSError] = {}  # by host
        try:
            hosts, port = find()
            for host in hosts:
                try:
                    return _connect(world, host, port, patience)
                except OSError as error:
                    failures[host] = error
            told = ", ".join(f"{host}:{port}: {e.strerror or e}" for host, e in failures.items())
            what, why = "cannot be reached", f"{told} (by {source})"
        except _NotYet as so_far:
            what, why = f"did not publish its address in {source}", str(so_far)
        time.sleep(POLL_S)
    for host, failure in failures.items():
        if isinstance(failure, socket.gaierror) and len(failures) == 1:
            raise ConfigError(f"{source}: {_unresolved(host)}")
    raise MeetingError(f"{world}: rank 0 on {world.host_of(0)} {what} within {patience.seconds} s: {why}")


def _connect(world: World, host: str, port: int, patience: timedelta) -> Contact:
    """Raises OSError."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
        ours, theirs = probe.getsockname()[0], probe.getpeername()[0]
    made: queue.SimpleQueue[dist.Store | dist.DistError] = queue.SimpleQueue()

    def make() -> None:
        try:
            made.put(dist.TCPStore(host, port, world.size, False, patience, wait_for_workers=False))
        except dist.DistError as error:
            made.put(error)

    # In a thread, as torch waits for ever for an answer from who listens there and serves no store.
    threading.Thread(target=make, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        store = made.get(timeout=min(ANSWER_S, patience.total_seconds()))
        if not isinstance(store, dist.DistError):
            return Contact(store, f"{host}:{port}", ours, theirs)
    raise OSError("something else listens there")

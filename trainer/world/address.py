"""Where rank 0 serves the store at which all ranks meet, and how the others find it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainer.config import ConfigError
from trainer.world.detect import World, hostname

POLL_S = 0.05
CONNECT_S = 3.0
SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of a network interface


class MeetingError(RuntimeError):
    """The ranks of an attempt did not find each other."""


def open_store(world: World, meeting: Path, init_method: str | None, patience: timedelta) -> tuple[dist.Store, str]:
    """The key-value store that rank 0 serves to all ranks, and its address; see `trainer.world.meet.meet`.

    Raises MeetingError when it cannot be reached in time, ConfigError when its address cannot be right.
    """
    by_hand = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    method = init_method or ("env://" if by_hand else f"file://{meeting}")
    scheme, _, place = method.partition("://")
    if scheme == "file":
        file = Path(place)
        return _publish(world, file, patience) if world.rank == 0 else _look_up(world, file, patience)
    if scheme == "env":
        host, port, source = _from_environment()
    else:
        host, _, digits = place.rpartition(":")
        port, source = int(digits), f"launch.init_method={method}"
    if scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun serves a store itself, which outlives its restarts.
        return _reach(world, [host], port, patience, source, f"laststep/{world.attempt}"), f"{host}:{port}"
    if world.rank == 0:
        return _serve(world, port, patience, source), f"{host}:{port}"
    return _reach(world, [host], port, patience, source), f"{host}:{port}"


def use_interface(world: World, store: dist.Store) -> None:
    """Have gloo use the network interface over which the ranks reach rank 0, unless GLOO_SOCKET_IFNAME names one.

    By itself it takes the address that the node's own name resolves to: on Debian often 127.0.1.1, which no other node
    can reach, and where names do not resolve the loopback.
    """
    if world.nodes == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if world.rank == 0:
        ours = store.get("rank 0 is reached at").decode()
    else:
        ours = store.get(f"rank {world.rank} comes from").decode()
    for name, address in interfaces().items():
        if address == ours:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interfaces() -> dict[str, str]:
    """IPv4 address by network interface of this machine (Linux), the loopback left out."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def _from_environment() -> tuple[str, int, str]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"launch.init_method=env://: {name} is not set")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ConfigError(f"MASTER_PORT={port}: must be a number")
    return host, int(port), f"MASTER_ADDR={host} MASTER_PORT={port}"


def _publish(world: World, file: Path, patience: timedelta) -> tuple[dist.Store, str]:
    """Rank 0: serve at any free port, and write down where."""
    store = _serve(world, 0, patience, "")
    # On one node no name needs to resolve: a laptop's or a container's own often does not.
    places = ["localhost"] if world.nodes == 1 else [hostname(), *interfaces().values()]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"places": places, "port": store.port}))
    temporary.replace(file)
    return store, f"{places[0]}:{store.port}"


def _look_up(world: World, file: Path, patience: timedelta) -> tuple[dist.Store, str]:
    """Any other rank: read where it serves."""
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        try:
            address = json.loads(file.read_text())
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        store = _reach(world, address["places"], address["port"], patience, str(file))
        return store, f"{address['places'][0]}:{address['port']}"
    raise MeetingError(
        f"{world}: rank 0 on {world.host_of(0)} did not publish its address in {file} within {patience.seconds} s"
    )


def _serve(world: World, port: int, patience: timedelta, source: str) -> dist.TCPStore:
    """Rank 0: bind the port, 0 for any free one. The bound socket goes to the store: nobody can take it in between."""
    try:
        listener = socket.create_server(("", port), backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"{source}: port {port} on {hostname()}: {error.strerror}; choose another, or leave it out: then rank 0 "
            "takes a free one"
        ) from None
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "localhost", port, world.size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _reach(
    world: World, hosts: Sequence[str], port: int, patience: timedelta, source: str, prefix: str = ""
) -> dist.Store:
    """Connect to the first of these that answers: names do not resolve everywhere, nor is every network shared."""
    deadline = time.monotonic() + patience.total_seconds()
    why = ""
    while time.monotonic() < deadline:
        for host in hosts:
            try:
                with socket.create_connection((host, port), timeout=CONNECT_S) as probe:
                    here, there = probe.getsockname()[0], probe.getpeername()[0]
            except socket.gaierror:
                why = f"{host} does not resolve on {hostname()}"
                if len(hosts) == 1:
                    raise ConfigError(f"{source}: {why}; give an IP address, or leave it out") from None
            except OSError as error:
                why = f"{host}:{port}: {error.strerror or error}"
            else:
                store: dist.Store = dist.TCPStore(host, port, world.size, False, patience, wait_for_workers=False)
                if prefix:
                    store = dist.PrefixStore(prefix, store)
                store.set(f"rank {world.rank} comes from", here)
                store.set("rank 0 is reached at", there)
                return store
        time.sleep(POLL_S)
    raise MeetingError(f"{world}: rank 0 cannot be reached within {patience.seconds} s ({why}; from {source})")

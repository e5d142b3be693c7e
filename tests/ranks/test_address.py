"""Rank 0's store is reached where the ranks connect, and nowhere else where that is certain."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from laststep.ranks import meeting as address
from laststep.ranks.launchers import address_towards
from tests.support.records import a_world

ETH, DOCKER = ("eth0", "10.0.0.1"), ("docker0", "172.17.0.1")
TWO_NODES: dict[str, Any] = {"nodes": 2, "hosts": ("h1", "h2"), "local_size": 1}


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def has(monkeypatch: pytest.MonkeyPatch, *interfaces: tuple[str, str], routes: dict[str, str] | None = None) -> None:
    """Give this host these interfaces, and names or addresses of other hosts with the own address on the way there."""
    monkeypatch.setattr(address, "interfaces", lambda: list(interfaces))
    monkeypatch.setattr(address, "address_towards", lambda host: (routes or {}).get(host, ""))


def listens_at(place: Path) -> set[str]:
    """The addresses at which rank 0 of a world on this machine listens, as Linux shows them."""
    met = address.connect_to_store(a_world(0, 2), "this", place, None, timedelta(seconds=60))
    port = f"{int(met.address.rpartition(':')[2]):04X}"
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[1].endswith(f":{port}") and line[3] == "0A"}


def test_on_one_machine_only_its_own_processes_connect(tmp_path: Path) -> None:
    """A laptop in a café: nobody else in that network may even knock."""
    assert listens_at(tmp_path / "meeting.json") == {"0100007F"}, "127.0.0.1, and nothing else"


def test_several_nodes_use_the_route_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of another node, or where names do not resolve by srun's address. docker0 leads nowhere."""
    has(monkeypatch, DOCKER, ETH, routes={"h2": "10.0.0.1", "10.0.0.9": "10.0.0.1", "loopback": "127.0.0.1"})
    assert address._meeting_address(a_world(0, 2, **TWO_NODES)) == "10.0.0.1"
    unknown = {**TWO_NODES, "hosts": ("h1", "h7")}
    assert address._meeting_address(a_world(0, 2, **unknown)) == "", "not certain: every interface"
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9")
    assert address._meeting_address(a_world(0, 2, **unknown)) == "10.0.0.1"
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "loopback")  # an address that no other node can reach
    assert address._meeting_address(a_world(0, 2, **unknown)) == ""
    has(monkeypatch, ETH)
    assert address._meeting_address(a_world(0, 2, **unknown)) == "10.0.0.1", "it has no other"


def test_variables_alone_do_not_say_that_there_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE, set by hand on two machines: rank 0 must not shut the other out."""
    has(monkeypatch, DOCKER, ETH)
    assert address._meeting_address(a_world(0, 2, "env")) == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert address._meeting_address(a_world(0, 2, "env")) == "127.0.0.1"


def test_a_name_stands_for_one_address_or_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Debian a host's own name is 127.0.1.1 there, at which no other host would find it."""
    names = {"h1": ["127.0.1.1"], "10.0.0.1": ["10.0.0.1"], "both": ["10.0.0.1", "fd00::1"], "far": ["10.0.0.7"]}
    names["localhost"] = ["::1", "127.0.0.1"]

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0)) for found in names[host]]

    has(monkeypatch, DOCKER, ETH)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    two = a_world(0, 2, **TWO_NODES)
    found = {name: address.named_address(two, name) for name in names}
    assert found == {"h1": "", "10.0.0.1": "10.0.0.1", "both": "", "far": "", "localhost": "127.0.0.1"}
    assert address.named_address(a_world(0, 2), "h1") == "127.0.1.1", "on one host that will do"


def test_the_way_to_another_host() -> None:
    """The system's own table of routes answers, without a packet."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") == ""

"""The graph along which NCCL adds, read from its log. One dead rail changes every sum, and nothing else says so.

The logs here are written in the form of NCCL's source: init.cc and graph/search.cc print these lines.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from laststep.ranks import nccl as nccl_graph
from laststep.ranks.device import NCCL_GRAPH, changed_numerics, describe_numerics
from laststep.ranks.group import Group
from laststep.ranks.nccl import combined, noted, summary
from tests.support.records import a_world

FORMS = (
    "Pattern %d, crossNic %d, nChannels %d, bw %f/%f, type %s/%s, sameChannels %d",
    "Ring %02d : %d -> %d -> %d",
    "Trees%s",
    "%d coll channels, %d collnet channels, %d nvls channels",
    "NCCL INFO ",
    "NCCL_DEBUG_FILE",
)
ORDERS = ((0, 1, 2, 3), (0, 3, 2, 1))  # of a node's ranks in its rings


def a_log(
    rank: int,
    size: int = 8,
    *,
    channels: int = 4,
    links: str = "NVL/PXN",
    bw: float = 48.0,
    orders: Sequence[Sequence[int]] = ORDERS,
    host: str = "n1",
    pid: int = 4711,
    bus: str = "1b000",
    stamp: str = "",
) -> str:
    """What a rank of `size`, four on a node, logs. Everything after `orders` differs between equal nodes."""
    within, between = links.split("/")
    texts = [
        "NCCL version 2.30.7+cuda13.0",
        "=== System : maxBw 48.0 totalBw 480.0 ===",
        f"+ PCI[24.0] - GPU/0-{bus} ({rank})",
        f"Pattern 4, crossNic 0, nChannels {channels}, bw {bw:.6f}/{bw:.6f}, type {within}/{between}, sameChannels 1",
        *(f" {c} : NET/0-{c} GPU/0-{bus} GPU/0-{bus} NET/0-{c}" for c in range(channels)),
        f"Pattern 1, crossNic 0, nChannels {channels}, bw {bw * 2:.6f}/{bw:.6f}, type {within}/PIX, sameChannels 1",
    ]
    nodes = size // 4
    for c in range(channels):
        ring = [4 * node + local for node in range(nodes) for local in orders[c % len(orders)]]
        at = ring.index(rank)
        texts.append(f"Ring {c:02d} : {ring[at - 1]} -> {rank} -> {ring[(at + 1) % size]}")
    texts += [
        "Trees" + "".join(f" [{c}] {rank + 1}/-1/-1->{rank}->{rank - 1}" for c in range(channels)),
        "P2P Chunksize set to 131072",
        f"Channel 00/0 : {rank}[{pid % 8}] -> {rank + 1}[1] via P2P/CUMEM",
        f"{channels} coll channels, {channels} collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per "
        "peer",
    ]
    return "".join(f"{stamp}{host}:{pid}:{pid + 7} [{pid % 8}] NCCL INFO {text}\n" for text in texts)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], str]:
    """A rank's part of the graph, from the text of its log."""

    def summary_of(text: str) -> str:
        (tmp_path / "log").write_text(text)
        return summary(tmp_path / "log")

    return summary_of


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither by this machine's environment nor by its files of NCCL."""
    for name in (*nccl_graph.LOG, nccl_graph.FILE, "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(nccl_graph, "CONF", tmp_path / "nccl.conf")


def test_the_same_on_other_nodes(read: Callable[[str], str]) -> None:
    """Equal nodes differ in their hosts, processes, bus ids and rails. A warning after each requeue would hide the one
    that matters."""
    here = [read(a_log(rank)) for rank in range(8)]
    stamp = "[2026-11-24 13:00:00] "
    elsewhere = [read(a_log(rank, host="gpu-17", pid=99, bus="c9000", stamp=stamp)) for rank in range(8)]
    assert here == elsewhere
    assert combined(here, nodes=2) == combined(elsewhere, nodes=2)
    assert combined(here, nodes=2).startswith("4 channels over NVL and PXN, ")
    assert combined(here[:4], nodes=1).startswith("4 channels over NVL, "), "no link between nodes is used"


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 3},
        {"links": "NVL/SYS"},
        {"links": "PIX/PXN"},
        {"bw": 24.0},  # NCCL takes fewer threads, and cuts a sum into other parts
        {"orders": [(0, 2, 1, 3)]},
    ],
    ids=str,
)
def test_another_one(change: dict[str, object], read: Callable[[str], str]) -> None:
    """Each of these makes NCCL add in another order. It is enough that one rank notes it."""
    usual = [read(a_log(rank)) for rank in range(8)]
    changed = [read(a_log(rank, **(change if rank == 5 else {}))) for rank in range(8)]  # type: ignore[arg-type]
    assert combined(changed, nodes=2) != combined(usual, nodes=2)


def test_the_text_is_that_of_the_worst_rank(read: Callable[[str], str]) -> None:
    """NCCL takes the least that any rank has found, and the text should show it."""
    texts = [read(a_log(0)), read(a_log(1, channels=3, links="NVL/SYS"))]
    assert combined(texts, nodes=2).startswith("3 channels over NVL and SYS, ")
    assert combined([read(a_log(0, links="NEW/PXN"))], nodes=2).startswith("4 channels over NEW and PXN, ")


@pytest.mark.parametrize(
    "text",
    ["", a_log(0).replace("Ring ", "Loop "), a_log(0).replace("coll channels", "lanes"), a_log(0).replace("Patt", "P")],
    ids=["empty", "no rings", "no number of channels", "no pattern"],
)
def test_a_log_of_another_form(text: str, read: Callable[[str], str]) -> None:
    """A newer NCCL may print something else. Half a graph would be the same for graphs that differ."""
    assert read(text) == "?this NCCL's log has no such lines"
    with pytest.raises(ValueError, match=r"^rank 1: this NCCL's log has no such lines$"):
        combined([read(a_log(0)), read(text)], nodes=1)


def test_the_installed_nccl_prints_these_lines() -> None:
    """The library holds the texts from which it makes them. If a newer one has others, this fails and names them."""
    found = importlib.util.find_spec("nvidia.nccl")
    folders = found.submodule_search_locations if found else None
    libraries = [file for folder in folders or [] for file in Path(folder).glob("lib/libnccl.so*")]
    if not libraries:
        pytest.skip("no NCCL beside torch")
    with libraries[0].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert [text for text in FORMS if library.find(text.encode()) < 0] == []


def test_the_log_is_asked_for_and_cleared_away() -> None:
    """Neither the file nor the variables outlast the communicator's beginning: a process that this one starts would
    write such logs too."""
    with noted() as own_part:
        assert os.environ["NCCL_DEBUG"] == "INFO" and os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,GRAPH"
        file = Path(os.environ["NCCL_DEBUG_FILE"])
        assert own_part() == "?this NCCL's log has no such lines"
        file.write_text(a_log(0))
        assert own_part().startswith("4 NVL PXN ")
    assert not file.exists() and not {*nccl_graph.LOG, nccl_graph.FILE} & {*os.environ}


def test_a_user_who_debugs_nccl_keeps_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their lines would vanish into our file."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with noted() as own_part:
        assert own_part() == "?NCCL_DEBUG is set" and nccl_graph.FILE not in os.environ
    assert os.environ["NCCL_DEBUG"] == "WARN"
    monkeypatch.delenv("NCCL_DEBUG")
    (tmp_path / "nccl.conf").write_text("# site\nNCCL_IB_HCA=mlx5\nNCCL_DEBUG=WARN\n")
    with noted() as own_part:
        assert own_part() == "?NCCL_DEBUG in nccl.conf is set" and nccl_graph.FILE not in os.environ


def connected(rank: int, logs: Sequence[str | None]) -> Group:
    """Rank `rank` of as many as there are logs, after its NCCL (played by the file that it is told to write) has
    connected it. None: NCCL writes nothing."""
    group = Group(a_world(rank, len(logs)), dist.HashStore(), torch.device("cpu"), "nccl")

    def init(*_: object, **__: object) -> None:
        if (log := logs[rank]) is not None:
            Path(os.environ["NCCL_DEBUG_FILE"]).write_text(log)

    def gather_bytes(data: bytes) -> list[bytes]:
        file = Path(os.environ.get("HOME", "/")).parent / "other"
        others = []
        for log in logs:
            file.write_text(log or "")
            others.append(summary(file).encode())
        assert others[rank] == data, "what this rank has read"
        return others

    with (
        mock.patch("laststep.ranks.group.dist.init_process_group", init),
        mock.patch("laststep.ranks.group.compat.set_timeout"),  # of the group that was not made
        mock.patch.object(group, "gather", lambda tensor: [tensor]),
        mock.patch.object(group, "gather_bytes", gather_bytes),
    ):
        group._init_nccl(timedelta(seconds=1))
    return group


def test_all_ranks_record_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    """Any rank may commit a checkpoint in a rescue. Where one rank cannot tell, none records anything, and one line
    says so."""
    logs = [a_log(rank, 4, links="NVL/PIX") for rank in range(4)]
    assert len({connected(rank, logs).nccl_graph for rank in range(4)}) == 1
    assert capfd.readouterr().out == ""
    assert [connected(rank, [*logs[:3], None]).nccl_graph for rank in range(4)] == [None] * 4
    (line,) = capfd.readouterr().out.splitlines()
    assert "NCCL's graph is not recorded" in line and "(rank 3: this NCCL's log has no such lines)" in line


def test_a_resume_over_another_graph_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the line that names all that has changed, with the key that would make it not matter. With that key it does
    not, and is not recorded."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))

    def numerics(graph: str | None, shares: bool = False) -> dict[str, str | int]:
        return describe_numerics(torch.device("cuda", 0), a_world(0, 8), "nccl", shares, nccl_graph=graph)

    before = numerics("16 channels over NVL and PXN, 3f2a9c1d")
    assert changed_numerics(before, numerics("14 channels over NVL and PXN, 77aa0b12")) == (
        "resuming with NCCL graph 14 channels over NVL and PXN, 77aa0b12 (was 16 channels over NVL and PXN, 3f2a9c1d): "
        "the last bits may differ; with train.shares they would not depend on NCCL's graph"
    )
    assert changed_numerics(before, numerics(None)) is None, "not known"
    assert NCCL_GRAPH not in numerics("16 channels over NVL, 3f2a9c1d", shares=True)

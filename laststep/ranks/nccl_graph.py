"""NCCL's graph: the rings and trees along which it adds, which a resume compares with those of its checkpoint.

Each rank searches its own node's links. Then all ranks take the least that any of them has found (`initTransportsRank`
in NCCL's src/init.cc). So one dead rail leaves every ring with fewer channels, and every sum in another order, without
a word in any log.

What the ranks have agreed on stands in NCCL's own log, in the same form from NCCL 2.21 to 2.30: each rank's neighbours
in each ring, its trees, and the number of channels. The lines that count have ranks, kinds of links and speeds, but no
devices, so equal nodes have equal graphs.

NCCL_GRAPH_DUMP_FILE would not do. It holds what one rank has found, before the ranks agree. And NCCL makes no
communicator at all if the dump has no word for a kind of link (`kvConvertToStr` in src/graph/xml.h): in NCCL 2.29 and
later that ends a run on one node whose GPUs have only slow links (`typeInter = PATH_DIS` in `ncclTopoCompute`).

All of this was read in NCCL's source, and was not tried: no GPU was available.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH"}
FILE = "NCCL_DEBUG_FILE"
CONF = Path("/etc/nccl.conf")
TEXT_BYTES = 96  # of what a rank reports to the others
NOTHING = "?"  # begins the text of a rank that could not read its graph

# The lines of the log that say in which order NCCL adds. The first pattern is that of the ring.
PATTERN = re.compile(r"Pattern \d+, crossNic \d+, nChannels \d+, bw [\d.]+/[\d.]+, type (\w+)/(\w+), sameChannels \d+")
RING = re.compile(r"Ring \d+ : -?\d+ -> -?\d+ -> -?\d+")
TREES = re.compile(r"Trees .+")
CHANNELS = re.compile(r"(\d+) coll channels, \d+ collnet channels, \d+ nvls channels")
# NCCL's names of the links between two devices, the nearest first (topoPathTypeStr in src/graph/topo.cc).
LINKS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], str]]:
    """Have NCCL write down the graph of the communicator that is made in this context. Yields a function that returns
    this rank's part of it as text, for `combined`; call it once the communicator has done its first collective.

    NCCL opens its log once per process, and so far it prints nothing: a user who has asked for its log keeps it.
    """
    if setter := _users_choice():
        yield lambda: f"{NOTHING}{setter} is set"
        return
    try:
        with tempfile.NamedTemporaryFile(prefix="laststep-nccl-") as file:
            os.environ.update(LOG | {FILE: file.name})
            yield lambda: summary(Path(file.name))
    finally:  # else the processes that this one starts would write such logs too
        for name in (*LOG, FILE):
            os.environ.pop(name, None)


def summary(log: Path) -> str:
    """This rank's part of the graph: channels, links within and between nodes, digest."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"{NOTHING}{error.strerror}"
    kept, channels, links = [], "", ("", "")
    for line in lines:
        text = line.partition(" NCCL INFO ")[2].strip()
        if counted := CHANNELS.match(text):
            channels, text = counted[1], counted[0]
        elif pattern := PATTERN.fullmatch(text):
            links = links if links[0] else (pattern[1], pattern[2])
        elif not (RING.fullmatch(text) or TREES.fullmatch(text)):
            continue
        kept.append(text)
    if not (channels and links[0] and any(map(RING.fullmatch, kept))):
        return f"{NOTHING}this NCCL's log has no such lines"
    return " ".join([channels, *links, hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]])


def combined(texts: Sequence[str], nodes: int) -> str:
    """What all ranks have written down, in rank order, as one short text: `16 channels over NVL and PXN, 3f2a9c1d`.
    Raises ValueError, which names the rank, when one has written down nothing."""
    for rank, text in enumerate(texts):
        if text.startswith(NOTHING):
            raise ValueError(f"rank {rank}: {text.removeprefix(NOTHING)}")
    channels, within, between, _ = zip(*(text.split() for text in texts))
    links = [max(kind, key=_distance) for kind in ((within, between) if nodes > 1 else (within,))]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
    return f"{min(map(int, channels))} channels over {' and '.join(links)}, {digest}"


def to_tensor(text: str) -> Tensor:
    """The text in a tensor whose size is the same on every rank."""
    return torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)), dtype=torch.uint8)


def from_tensor(tensor: Tensor) -> str:
    """The text that `to_tensor` has put there."""
    return bytes(tensor.tolist()).decode(errors="replace").strip()


def _distance(link: str) -> int:
    return LINKS.index(link) if link in LINKS else len(LINKS)


def _users_choice() -> str:
    """Which of these variables the user or the site has set; empty if none. NCCL also reads two files."""
    names = (*LOG, FILE)
    if found := [name for name in names if name in os.environ]:
        return found[0]
    own = os.environ.get("NCCL_CONF_FILE") or Path.home() / ".nccl.conf"
    for path in (Path(own), CONF):
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                if (name := line.partition("=")[0]) in names:
                    return f"{name} in {path.name}"
    return ""

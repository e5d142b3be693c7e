"""NCCL: the environment variables of torch's collectives over it, and the graph along which it adds.

A rank that dies leaves the others in a collective that never ends, with the state of the last whole step in their
memory. For the rescue torch must neither end the process nor abort the communicator: then the collective would end,
half done, and the update queued behind it would spoil the state. So (torch/csrc/distributed/c10d of torch 2.11 and
2.15):

* TORCH_NCCL_ASYNC_ERROR_HANDLING=0: 1 and 2 abort the communicator, 1 and 3, the default, end the process.
* TORCH_NCCL_RETHROW_CUDA_ERRORS=0: else the thread that polls the collectives throws a CUDA error, which ends the
  process without a record. Our watchdog asks the device twice a second and reports the error with the rank's name.
* TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: the monitor, which writes the flight recorder's file, ends the process if that
  thread is stuck for so long by the clock, which moves on while the job is suspended.

The graph is the rings and trees along which NCCL adds. All ranks take the least that any of them has found
(`initTransportsRank` in NCCL's src/init.cc), so one dead rail changes every sum, without a word in any log. A resume
compares the graph with its checkpoint's. It is read from NCCL's own log, where each rank's neighbours have the same
form from NCCL 2.21 to 2.30, and name no devices: equal nodes have equal graphs. NCCL_GRAPH_DUMP_FILE holds what one
rank has found before the ranks agree, and NCCL makes no communicator if the dump has no word for a kind of link.

All of this was read in the sources, and was not tried: no GPU was available.
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

# Either variable names the files; torch prefers the first.
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
HEARTBEAT_S = 7 * 24 * 3600  # torch counts in 32 bits of milliseconds

ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
DESYNC_DEBUG = ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")
OFF = ("", "0", "n", "no", "f", "false", "off")

# What NCCL may otherwise choose anew for each topology and message size, and what `pin_algorithms` chooses.
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
# By either name: how many parts a sum is cut into, each with its own ring.
CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")


def set_defaults(records: Path) -> None:
    """Set the variables that the user has not set. Call this before the ranks meet. When a collective fails, each rank
    writes its last collectives into the file `records` followed by its number, for `python -m
    torch.distributed.flight_recorder.fr_trace`. torch's default is a file that all runs overwrite."""
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not any(name in os.environ for name in RECORDS):
        os.environ[RECORDS[0]] = str(records)
    if not any(name in os.environ for name in ERROR_HANDLING):
        os.environ[ERROR_HANDLING[0]] = "0"
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(HEARTBEAT_S))  # our watchdog is there long before


def harmful_settings() -> list[str]:
    """A line for each of the user's settings with which no step can be saved after a rank has died."""
    problems = []
    if set_to := _set(ERROR_HANDLING):
        effect = "lets half an all-reduce through" if set_to.endswith("=2") else "ends the process"
        problems.append((set_to, f"torch {effect} when a collective fails"))
    if set_to := _set(BLOCKING_WAIT):
        problems.append((set_to, "torch aborts a collective that takes too long"))
    debug = _set(DESYNC_DEBUG)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        debug = debug or "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    if debug and not _set(ERROR_HANDLING):
        problems.append((debug, "torch then ends the process when a collective fails"))
    return [f"WARNING: {set_to}: {why}; after a rank's death no step can be saved" for set_to, why in problems]


def _set(names: tuple[str, ...]) -> str | None:
    """The first of these variables that is set, and not switched off, with its value."""
    return next((f"{n}={os.environ[n]}" for n in names if os.environ.get(n, "").lower() not in OFF), None)


def pin_algorithms() -> None:
    """Take from NCCL the choices that it makes by topology and size, each of which adds in another order, for
    train.deterministic. Call this before the communicator is made. What the user has set stays.

    Ring is the one algorithm that every collective has, Simple the one protocol that is safe on all hardware (LL128 is
    not). NVLS and CollNet let switches add. The channels and the order of ranks in a ring, which NCCL derives from the
    links of the nodes, are noted as its graph.
    """
    for name, value in PINNED.items():
        os.environ.setdefault(name, value)


def describe() -> dict[str, str]:
    """NCCL's version, and the variables in the environment that determine the order of its sums."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    settings = (f"{name}={os.environ[name]}" for name in (*PINNED, *CHANNELS) if name in os.environ)
    return {"NCCL": " ".join([version, *settings])}


LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH"}
FILE = "NCCL_DEBUG_FILE"
CONF = Path("/etc/nccl.conf")
NOTHING = "?"  # begins the text of a rank that could not read its graph

# The lines of the log that say in which order NCCL adds. The first pattern is that of the ring.
PATTERN_LINE = re.compile(
    r"Pattern \d+, crossNic \d+, nChannels \d+, bw [\d.]+/[\d.]+, type (\w+)/(\w+), sameChannels \d+"
)
RING_LINE = re.compile(r"Ring \d+ : -?\d+ -> -?\d+ -> -?\d+")
TREES_LINE = re.compile(r"Trees .+")
CHANNEL_LINE = re.compile(r"(\d+) coll channels, \d+ collnet channels, \d+ nvls channels")
# NCCL's names of the links between two devices, the nearest first (topoPathTypeStr in src/graph/topo.cc).
LINKS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], str]]:
    """Have NCCL write down the graph of the communicator that is made in this context. Yields a function that returns
    this rank's part of it as text, for `combined`, once the communicator has done its first collective. NCCL opens its
    log once per process: a user who has asked for it keeps it."""
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
        if counted := CHANNEL_LINE.match(text):
            channels, text = counted[1], counted[0]
        elif pattern := PATTERN_LINE.fullmatch(text):
            links = links if links[0] else (pattern[1], pattern[2])
        elif not (RING_LINE.fullmatch(text) or TREES_LINE.fullmatch(text)):
            continue
        kept.append(text)
    if not (channels and links[0] and any(map(RING_LINE.fullmatch, kept))):
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

"""Environment variables of torch's NCCL collectives, where torch's own default does not suit a run.

According to the headers of torch 2.11 and 2.15 and sources of about that age; not tested, as no GPU was available. Two
defaults suit as they are. The flight recorder is on (TORCH_FR_BUFFER_SIZE, 2000 collectives). And errors are detected
even when no thread waits for a collective (TORCH_NCCL_ASYNC_ERROR_HANDLING=3): a rank that detects one ends itself, in
2.15 at once, in 2.11 a minute later. If it survived, it might save a state that contains half an all-reduce.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Either variable names the files; torch prefers the first.
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

# What NCCL may otherwise choose anew for each topology and message size, and what `pin_algorithms` chooses.
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
# By either name: how many parts a sum is cut into, each with its own ring.
CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")


def set_defaults(records: Path, timeout_s: float) -> None:
    """Set the variables that the user has not set. Call this before the ranks meet. `timeout_s` is the hang timeout.

    When a collective fails or takes too long, each rank writes its last collectives into a file: `records` followed by
    the rank's number. `python -m torch.distributed.flight_recorder.fr_trace` reads it. torch's default is a file in
    ~/.cache, which the ranks of all runs overwrite.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not any(name in os.environ for name in RECORDS):
        os.environ[RECORDS[0]] = str(records)
    # torch ends a process whose NCCL thread is stuck for this long. Our watchdog, which saves, must act first.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{2 * timeout_s:.0f}")


def pin_algorithms() -> None:
    """Take from NCCL the choices that it makes by topology and size, for train.deterministic. Call this before the
    ranks meet. A variable that the user has set stays as it is, and `describe` shows it.

    Each choice adds in another order. Ring is the one algorithm that every collective has, Simple the one protocol that
    is safe on all hardware (LL128 is not). NVLS and CollNet let switches add, in an order of their own. The number of
    channels and the order of ranks in a ring stay NCCL's: it derives them from the links of the nodes, so they are the
    same as long as the hardware and the layout are.
    """
    for name, value in PINNED.items():
        os.environ.setdefault(name, value)


def describe() -> dict[str, str]:
    """NCCL's version, and the variables in the environment that determine the order of its sums."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    settings = (f"{name}={os.environ[name]}" for name in (*PINNED, *CHANNELS) if name in os.environ)
    return {"NCCL": " ".join([version, *settings])}
